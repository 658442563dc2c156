// stream.cc - see stream.h.
#include "cuda_kit/stream.h"

#include <memory>

#include "cuda_kit/error.h"

namespace strata::cuda_kit {

using plugin_kit::raise;

Work work_on(const strata_stream* stream, cudaStream_t own, int ordinal) {
  if (!stream || stream->domain == STRATA_CPU) return {own, true};
  if (stream->domain != STRATA_CUDA) {
    raise(STRATA_INVALID_ARGUMENT, "the stream is of device type ", stream->domain,
          "; streams of type 2 (CUDA) and 1 (CPU: done at return) are served");
  }
  if (stream->device_id != ordinal) {
    raise(STRATA_INVALID_ARGUMENT, "the stream is of GPU ", stream->device_id, ", this is GPU ", ordinal);
  }
  if (!stream->native) {
    raise(STRATA_INVALID_ARGUMENT, "the stream's handle is NULL; the legacy default stream is CU_STREAM_LEGACY (0x1)");
  }
  return {static_cast<cudaStream_t>(stream->native), false};
}

namespace {

struct Pending {
  const strata_sync_api* sync;
  strata_event* event;
  const char* what;
};

void CUDART_CB finish(cudaStream_t, cudaError_t error, void* arg) {
  const std::unique_ptr<Pending> pending(static_cast<Pending*>(arg));
  std::string text;
  try {
    if (error != cudaSuccess) text = plugin_kit::join(pending->what, ": ", describe(error));
  } catch (...) {  // no memory for the text: the code has to do
  }
  pending->sync->set(pending->event, status_of(error), error == cudaSuccess ? nullptr : text.c_str());
  pending->sync->release(pending->event);
}

}  // namespace

void set_when_done(cudaStream_t stream, const strata_sync_api* sync, strata_event* event, const char* what) {
  auto pending = std::make_unique<Pending>(Pending{sync, event, what});
  sync->retain(event);
  const cudaError_t error = cudaStreamAddCallback(stream, finish, pending.get(), 0);
  if (error == cudaSuccess) {
    pending.release();
    return;
  }
  sync->release(event);
  check(error, what, ": asking to be called when the stream is done");
}

}  // namespace strata::cuda_kit
