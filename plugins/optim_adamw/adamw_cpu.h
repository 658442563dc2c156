// adamw_cpu.h - runs the kernels of one instruction set over the blocks of a call, on the rank's worker threads.
//
// Spans are cut into blocks of a fixed number of elements, so the work done never depends on the number of threads.
// Every block runs in the default floating-point environment: workers inherit the host's, which may flush subnormals.
// Arguments were checked by the caller (optim_adamw.cc). Instances share nothing and may be used from any thread.
#pragma once

#include <string>

#include "adamw/arguments.h"
#include "adamw_kernels.h"

namespace strata::adamw {

enum class Isa { kScalar, kAvx2, kAvx512 };

const char* isa_name(Isa isa);
bool cpu_has(Isa isa);
Isa best_isa();
const Kernels* kernels_of(Isa isa);  // nullptr when cpu_has is false

// Runs fn(arg, i) for i in [0, n) on several threads; strata_executor_api::parallel_for bound to its context.
struct Parallel {
  const strata_executor_api* executor;  // nullptr: on the calling thread
  void* ctx;
  void run(uint64_t n, void (*fn)(void* arg, uint64_t i), void* arg) const;
};

// strata_optimizer_api::step. Throws std::bad_alloc only before anything is written.
void run_step(const Kernels& kernels, const Parallel& parallel, Form form, const strata_optim_args& args);

// strata_optimizer_api::export_array and import_array for the canonical arrays.
void run_export(const Parallel& parallel, Form form, const strata_optim_args& args, Canonical array, float* out);
void run_import(const Parallel& parallel, Form form, const strata_optim_args& args, Canonical array, const float* in);

}  // namespace strata::adamw
