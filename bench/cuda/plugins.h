// plugins.h - device_cuda and the AdamW plugins opened by their ABI, with the core's own host services around them.
//
// Every failure ends the process with its text: a bench that cannot run has no figure. Where there is no GPU, it ends
// with the exit code of skipped tests and the plugin's reason.
#pragma once

#include <string>
#include <vector>

#include "core/plugins/host.h"
#include "strata/iface/device.h"
#include "strata/iface/optimizer.h"

namespace strata::bench {

void expect_ok(strata_status code);

// The last line of a bench that cannot run here, and the end of the process.
[[noreturn]] void skip(const std::string& name, const std::string& reason);

class Gpu {
 public:
  // `name` is the figure's, for the skip.
  explicit Gpu(const std::string& name);
  ~Gpu();
  Gpu(const Gpu&) = delete;

  void* alloc(uint64_t bytes);
  void* alloc_pinned(uint64_t bytes);
  void copy(void* to, const void* from, uint64_t bytes);  // done at return
  void wait();                                            // for the stream

  const strata_device_api* api;
  strata_device* self = nullptr;
  strata_stream stream{};
  Host host;
};

// A slice of `count` elements with one set of scalars.
struct Slice {
  strata_dtype grad_dtype, weight_dtype;
  void *grad, *weight;
  std::vector<void*> state;
  uint64_t count;
};

class Optimizer {
 public:
  // `gpu` NULL: optim_adamw, scalar. Else optim_adamw_cuda, on its stream.
  Optimizer(Host& host, Gpu* gpu, bool split);
  ~Optimizer();
  Optimizer(const Optimizer&) = delete;

  // On a GPU the call returns when the work is enqueued.
  void step(const Slice& slice, uint64_t step, float grad_scale);

 private:
  Gpu* gpu_;
  const strata_optimizer_api* api_;
  strata_optim* self_ = nullptr;
};

// The program's jobs; they return its exit code.
int adamw_bits(const std::string& name);
int speed(const std::string& name);

}  // namespace strata::bench
