// gpu.h - the harness's side of a GPU, a simulated one (tests/gpu_sim) or a real one: streams of the host's own, and
// the gradients that are computed on them from fetched weights, without the host ever waiting.
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <string>
#include <thread>
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
  const strata_stream* other_stream() const { return &other_; }
  // The stream stands still for a while (a simulated one): the host runs ahead of it. At most once between waits.
  void hold_for(std::chrono::milliseconds time);
  // On a stream: an fp32 tensor of these values, that stays until `wait`. Its shape stays the caller's.
  strata_tensor tensor(const std::vector<float>& values, const std::vector<int64_t>& shape,
                       const strata_stream* stream);
  // On the stream: a tensor of noise + weight, fp32, that stays until `wait`. `weight` is a fetched view.
  strata_tensor gradient(const strata_tensor& weight, const std::vector<float>& noise);
  // The same, of zeros.
  strata_tensor zeros(const strata_tensor& weight, uint64_t elements);
  // Memory for gradients: fresh at every loan, full of NaN before and after it.
  const strata_lender* lender() const { return &lender_; }
  int loans() const { return loans_; }
  int on_loan() const { return on_loan_; }
  // Until everything on the streams is done; `wait` also frees all tensors made here.
  void sync();
  void wait();

 private:
  Options options_;
  Rank host_;
  const strata_device_api* api_;
  strata_device* self_ = nullptr;
  void* to_device(const std::vector<float>& values, const strata_stream* stream);
  static void* STRATA_CALL lend(void* self, uint64_t bytes, const strata_stream* stream);
  static void STRATA_CALL take_back(void* self, void* memory, const strata_stream* stream);
  strata_stream stream_{}, other_{};
  std::thread holder_;
  strata_lender lender_{};
  std::map<void*, uint64_t> lent_;
  int loans_ = 0, on_loan_ = 0;
  std::deque<void*> device_, pinned_;
};

}  // namespace strata::test
