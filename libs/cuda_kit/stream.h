// stream.h - strata_stream on CUDA, and events of the host set by the end of work on one.
#pragma once

#include <cuda_runtime_api.h>

#include "strata/host.h"

namespace strata::cuda_kit {

// Where a call puts its work, and whether it ends only when that is done.
struct Work {
  cudaStream_t stream;
  bool wait;
};

// A CUDA stream of this device is used as it is. No stream, or one of the CPU domain, means a caller whose calls are
// done when they return: `own` is used, and waited for. Throws INVALID_ARGUMENT.
Work work_on(const strata_stream* stream, cudaStream_t own, int ordinal);

// Sets `event` once everything enqueued on `stream` so far is done, with the device's error if there was one; `what`
// [static] opens its text. Holds a reference until then.
//
// A callback of the stream, because it is the one mechanism that is told the error: cudaLaunchHostFunc is not called at
// all after one, so that a host waiting for the event would learn of a dead device by its deadline only. A thread that
// waits for CUDA events would have to be one per stream, or let one stream's work hold up the news of another's.
// Throws when the device refuses; then the event is not set.
void set_when_done(cudaStream_t stream, const strata_sync_api* sync, strata_event* event, const char* what);

}  // namespace strata::cuda_kit
