// gpu.h - one simulated GPU: memory, streams, and the first failure of its work.
//
// A rank's device and its collective are opened apart, the collective first, and work on one GPU, as CUDA and NCCL do.
// They find it by job and local rank; it exists while one of them is open. That list is the only global state, and it
// stands for the hardware. Threads: any.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "memory.h"
#include "plugin_kit/plugin_kit.h"
#include "strata/host.h"
#include "stream.h"

namespace gpu_sim {

using strata::plugin_kit::Error;

// The options of the plugin that make the GPU what it is.
struct Settings {
  int64_t memory_bytes;
  int64_t delay_us;
  int64_t seed;
  bool operator==(const Settings&) const = default;
};
// Throws an Error for a value out of range.
Settings read_settings(const strata_options* options);

class Gpu {
 public:
  // Throws an Error when the GPU is there with other settings.
  static std::shared_ptr<Gpu> attach(const std::string& job, int local_rank, const Settings& settings);
  Gpu(int id, const Settings& settings);

  Memory& memory() { return memory_; }
  int id() const { return id_; }

  strata_stream create_stream();
  void destroy_stream(void* native);  // when its work is done
  // The stream to enqueue on; nullptr for none and for one of the CPU domain. Throws an Error for a foreign one.
  std::shared_ptr<Stream> find_stream(const strata_stream* stream);

  // The first failure of enqueued work stays, as on a GPU: work that follows is skipped.
  void fail(const Error& error);
  bool failed() const { return failed_; }
  Error failure() const;

 private:
  const int id_;
  const Settings settings_;
  Memory memory_;
  mutable std::mutex mutex_;
  Error failure_;
  std::atomic<bool> failed_{false};
  uint64_t streams_made_ = 0;
  std::map<void*, std::shared_ptr<Stream>> streams_;  // last: their work uses the rest
};

}  // namespace gpu_sim
