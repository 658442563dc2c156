// gpu.cc - the list of GPUs, and what belongs to one.
#include "gpu.h"

#include <array>

namespace gpu_sim {

using strata::plugin_kit::raise;

Settings read_settings(const strata_options* options) {
  const strata::plugin_kit::Options given(options);
  const Settings settings = {given.integer("memory_bytes", int64_t{1} << 30), given.integer("delay_us", 0),
                             given.integer("seed", 0)};
  if (settings.memory_bytes < 1 || settings.memory_bytes > int64_t{1} << 40) {
    raise(STRATA_INVALID_ARGUMENT, "option memory_bytes = ", settings.memory_bytes, ": it is 1 to 2^40");
  }
  if (settings.delay_us < 0 || settings.delay_us > 1'000'000) {
    raise(STRATA_INVALID_ARGUMENT, "option delay_us = ", settings.delay_us, ": it is 0 to 1000000");
  }
  return settings;
}

std::shared_ptr<Gpu> Gpu::attach(const std::string& job, int local_rank, const Settings& settings) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, int>, std::weak_ptr<Gpu>> gpus;
  std::lock_guard lock(mutex);
  std::weak_ptr<Gpu>& place = gpus[{job, local_rank}];
  std::shared_ptr<Gpu> gpu = place.lock();
  if (!gpu) place = gpu = std::make_shared<Gpu>(local_rank, settings);
  if (gpu->settings_ != settings) {
    raise(STRATA_FAILED_PRECONDITION, "GPU ", local_rank, " of job \"", job, "\" is open with other options");
  }
  return gpu;
}

Gpu::Gpu(int id, const Settings& settings)
    : id_(id), settings_(settings), memory_(static_cast<uint64_t>(settings.memory_bytes)) {}

strata_stream Gpu::create_stream() {
  std::lock_guard lock(mutex_);
  // Another sequence of delays for every stream of every GPU.
  std::seed_seq parts{settings_.seed, int64_t{id_}, static_cast<int64_t>(streams_made_++)};
  std::array<uint32_t, 1> seed;
  parts.generate(seed.begin(), seed.end());
  auto stream = std::make_shared<Stream>(std::chrono::microseconds(settings_.delay_us), seed[0]);
  void* native = stream.get();
  streams_.emplace(native, std::move(stream));
  return {sizeof(strata_stream), STRATA_ABI_MINOR, STRATA_CUDA, id_, native};
}

void Gpu::destroy_stream(void* native) {
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard lock(mutex_);
    const auto found = streams_.find(native);
    if (found == streams_.end()) return;
    stream = std::move(found->second);
    streams_.erase(found);
  }
  stream->drain();
}

std::shared_ptr<Stream> Gpu::find_stream(const strata_stream* stream) {
  if (!stream || stream->domain == STRATA_CPU) return nullptr;
  std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream->native);
  if (stream->domain != STRATA_CUDA || found == streams_.end()) {
    raise(STRATA_INVALID_ARGUMENT, "the stream (device type ", stream->domain, ", device ", stream->device_id,
          ", native ", stream->native, ") is none of GPU ", id_);
  }
  return found->second;
}

void Gpu::fail(const Error& error) {
  std::lock_guard lock(mutex_);
  if (!failure_.ok()) return;
  failure_ = error;
  failed_ = true;
}

Error Gpu::failure() const {
  if (!failed_) return {};
  std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace gpu_sim
