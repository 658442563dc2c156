// gpu.h - the harness's side of a GPU, a simulated one (tests/gpu_sim) or a real one: a stream of the host's own, and
// the gradients that are computed on it from fetched weights, without the host ever waiting.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "strata/iface/device.h"
#include "strata/strata.h"
#include "tests/support/plugin_fixture.h"

namespace strata::test {

class Gpu {
 public:
  // Why device_cuda cannot run here; "" when it can, with this many GPUs.
  static std::string absent(int gpus);
  // The GPU the engine of this job and rank has.
  Gpu(const std::string& plugin, const std::string& job, int rank, int world, int delay_us);
  ~Gpu();

  const strata_stream* stream() const { return &stream_; }
  // On the stream: a tensor of noise + weight, fp32, that stays until `wait`. `weight` is a fetched view.
  strata_tensor gradient(const strata_tensor& weight, const std::vector<float>& noise);
  // Until everything on the stream is done.
  void wait();

 private:
  Options options_;
  Rank host_;
  const strata_device_api* api_;
  strata_device* self_ = nullptr;
  strata_stream stream_{};
  std::deque<void*> device_, pinned_;
};

}  // namespace strata::test
