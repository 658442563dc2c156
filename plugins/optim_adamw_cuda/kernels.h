// kernels.h - the kernels of optim_adamw_cuda and how they are launched; kernels.cu is compiled by nvcc.
//
// A launch enqueues and returns CUDA's error. Pointers are memory that kernels can reach, at multiples of their
// elements. Arithmetic is libs/adamw/formula.h, compiled without contraction and with IEEE division and square root.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "adamw/forms.h"

namespace strata::adamw {

// Elements per thread block: four per thread. Tiles lie at multiples of this in the slice, so a span's first and last
// may be cut short.
inline constexpr uint64_t kTile = 1024;
inline constexpr unsigned kUsedScalars = 6;  // ScalarIndex

// A span as a range of tiles: tile b belongs to the last span whose first_tile is not above b.
struct TiledSpan {
  uint64_t offset, length;
  uint64_t first_tile;
  uint64_t scalar_set;  // of the job, not of the call
};

// Spans and scalars travel as kernel arguments while they fit, else in device memory.
inline constexpr unsigned kInlineSpans = 40;

struct Job {
  const void* grad;
  void* weight;
  void* master;  // float for kWhole..., uint16_t for kSplitBf16, unused for kSplitF32
  float* exp_avg;
  float* exp_avg_sq;
  const float* grad_scale;  // NULL: grad_scale_value
  const uint32_t* apply;    // NULL: 1
  const TiledSpan* spans;   // NULL: the array below
  const float* scalars;     // sets of kUsedScalars; NULL: the array below
  uint32_t span_count;
  float grad_scale_value;
  bool together;  // four elements at a time can be moved at every multiple of four
  TiledSpan inline_spans[kInlineSpans];
  float inline_scalars[kInlineSpans * kUsedScalars];
};
static_assert(sizeof(Job) < 4096, "the arguments of a kernel");

// Loads every kernel onto the current device, as device_cuda does and for the same reason.
cudaError_t load_kernels();

cudaError_t launch_step(Grad grad, Form form, const Job& job, uint64_t tiles, cudaStream_t stream);

// master = join(weight, low) of `count` elements, for kSplitBf16.
cudaError_t launch_export_split(float* out, const uint16_t* weight, const uint16_t* low, uint64_t count,
                                cudaStream_t stream);
// Canonical values of `in` into a moment, or into what keeps the master, and the weight.
cudaError_t launch_import_moment(float* moment, const float* in, uint64_t count, cudaStream_t stream);
cudaError_t launch_import_master(Form form, void* weight, void* master, const float* in, uint64_t count,
                                 cudaStream_t stream);

}  // namespace strata::adamw
