// update.h - a call of the optimizer as launches: spans to tiles, slices in and out, host arrays by way of the device.
//
// Everything is enqueued on the given stream, in its order; arguments were checked as far as that goes without a
// device (libs/adamw/arguments.h). What is thrown is an Error, before anything is enqueued that writes. The device is
// current. Any thread.
#pragma once

#include "adamw/arguments.h"
#include "cuda_kit/memory.h"

namespace strata::adamw {

struct Gpu {
  int ordinal;
  cuda_kit::Pool& pool;
};

// One launch.
void enqueue_step(const Gpu& gpu, Form form, const strata_optim_args& args, cudaStream_t stream);

// Returns when `out` is filled, or `in` read and written to where it belongs.
void run_export(const Gpu& gpu, Form form, const strata_optim_args& args, Canonical array, float* out,
                cudaStream_t stream);
void run_import(const Gpu& gpu, Form form, const strata_optim_args& args, Canonical array, const float* in,
                cudaStream_t stream);

}  // namespace strata::adamw
