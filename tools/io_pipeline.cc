#include "tools/io_pipeline.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>

namespace strata::cli {
namespace {

using Clock = std::chrono::steady_clock;

// Transfers whose piece decides on their buffer and on their place in the file.
class Transfers {
 public:
  Transfers(io::Queue& queue, const Pipeline& pipeline)
      : queue_(queue),
        pipeline_(pipeline),
        bytes_(std::min(kTransfer, pipeline.file_bytes / (kPipelineBuffers + 4) / kAligned * kAligned)) {}

  // Waits for the transfer before it in the same buffer.
  void begin(bool write, uint64_t piece) {
    const uint64_t buffer = piece % kPipelineBuffers;
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return !under_way_[buffer]; });
    under_way_[buffer] = true;
    lock.unlock();
    const uint64_t at = piece % (pipeline_.file_bytes / bytes_) * bytes_;
    queue_.submit({write, pipeline_.file, at, pipeline_.memory + buffer * kTransfer, bytes_,
                   [this, buffer](int error, uint64_t moved) { end(buffer, error, moved); }});
  }

  bool failed() {
    std::lock_guard lock(mutex_);
    return result_.error != 0;
  }

  // Waits for all. `rate` is the bytes that moved.
  io::LoadResult finish() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock,
                [&] { return std::none_of(under_way_, under_way_ + kPipelineBuffers, [](bool b) { return b; }); });
    return result_;
  }

 private:
  static constexpr uint64_t kAligned = 65536;  // the largest alignment of a file system

  void end(uint64_t buffer, int error, uint64_t moved) {
    std::lock_guard lock(mutex_);
    if (!result_.error) result_.error = error;
    result_.rate += static_cast<double>(moved);
    under_way_[buffer] = false;
    ended_.notify_all();
  }

  io::Queue& queue_;
  const Pipeline pipeline_;
  const uint64_t bytes_;
  std::mutex mutex_;
  std::condition_variable ended_;
  bool under_way_[kPipelineBuffers] = {};
  io::LoadResult result_;
};

}  // namespace

io::LoadResult run_pipeline(io::Queue& queue, const Pipeline& pipeline, std::chrono::nanoseconds length) {
  Transfers transfers(queue, pipeline);
  const auto begin = Clock::now();
  uint64_t read = 0;
  for (uint64_t piece = 0;; ++piece) {
    const bool goes_on = Clock::now() < begin + length && !transfers.failed();
    for (; goes_on && read <= piece + kPipelineAhead; ++read) transfers.begin(false, read);
    if (piece == read) break;
    transfers.begin(true, piece);
  }
  io::LoadResult result = transfers.finish();
  result.rate /= std::chrono::duration<double>(Clock::now() - begin).count();
  return result;
}

}  // namespace strata::cli
