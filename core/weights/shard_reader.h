// shard_reader.h - weight shards that lie in a tier without addresses, read ahead of the gathers that want them.
//
// The host thread says which shards come next, in the order of the gathers. A thread of its own reads each, when its
// update is done, in pieces through a ring of buffers in host memory; the collective thread copies the pieces to where
// the gather begins and so frees the buffers. What is read ahead is bounded by the buffers, and by what the host asked
// for (prefetch_bucket_size).
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/stream.h"
#include "core/tier.h"

namespace strata {

class ShardReader {
 public:
  ShardReader(const Device& device, const Tier& tier, std::chrono::nanoseconds deadline, Trace& trace)
      : device_(device), tier_(tier), deadline_(deadline), trace_(trace) {}
  // Waits for reads under way; nothing may be in bring().
  ~ShardReader();

  // `bytes` of a buffer: a multiple of 4096.
  Status allocate(uint64_t buffers, uint64_t bytes, const std::vector<int>& cpus);

  // Host thread. `after` may be empty.
  void expect(const std::string& what, uint32_t unit, const Region& region, Work after);
  // Collective thread, once for each expect and in their order: all of the region, to `to`, as work on `stream`.
  Status bring(const Region& region, char* to, const strata_stream* stream);
  // Nothing more comes: ends what waits here.
  void stop();

 private:
  struct Request {
    std::string what;
    uint32_t unit;
    const Region* region;
    Work after;
    uint64_t step;  // in the trace
  };
  struct Buffer : TransferBuffer {
    Marker emptied;
  };
  // A piece on its way into a buffer, or there.
  struct Piece {
    Buffer* buffer = nullptr;
    uint64_t bytes = 0;
    Work read;
  };
  void work();
  Status read(const Request& request);
  Buffer* take_buffer();
  Status take_piece(Piece* out);
  Status take_over(const Piece& piece, char* to, const strata_stream* stream);
  static void end(const Piece& piece);

  const Device& device_;
  const Tier& tier_;
  const std::chrono::nanoseconds deadline_;
  Trace& trace_;
  std::vector<Buffer> buffers_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Request> requests_;
  std::deque<Piece> pieces_;
  std::deque<Buffer*> free_;
  Status failure_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace strata
