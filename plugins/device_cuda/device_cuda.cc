// device_cuda.cc - strata.device/1 on an NVIDIA GPU: checks, streams, markers, and the table. Memory is in memory.cc,
// the kernels in kernels.cu.
//
// Work goes to the caller's CUDA stream and the call returns. Callers without one (NULL, or a stream of the CPU domain)
// get the plugin's own stream, and the call returns when the work is done: code written for device_host works as it is.
// Every call makes the device current for its length (cuda_kit/context.h).
//
// Threads: all operations may run at once. Locks guard the lists of memory and of streams, nothing else.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>

#include "cuda_kit/context.h"
#include "cuda_kit/error.h"
#include "cuda_kit/stream.h"
#include "kernels.h"
#include "memory.h"
#include "plugin_kit/dtypes.h"
#include "plugin_kit/plugin_kit.h"
#include "strata/plugin.h"

using namespace strata::cuda_kit;
using namespace strata::plugin_kit;
using namespace strata::device_cuda;

struct strata_marker {
  cudaEvent_t event;
};

struct strata_device {
  strata_device(const strata_host* lender, const strata_sync_api* sync_api, const Context& gpu, uint64_t memory_budget,
                uint64_t pinned_budget)
      : host(lender), sync(sync_api), context(gpu), memory(gpu.ordinal(), memory_budget, pinned_budget) {}
  strata_device(const strata_device&) = delete;
  ~strata_device() {
    for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
    if (own) cudaStreamDestroy(own);
  }

  const strata_host* host;
  const strata_sync_api* sync;
  Context context;
  Memory memory;
  cudaStream_t own = nullptr;  // of callers without a CUDA stream
  std::mutex mutex;
  std::unordered_set<cudaStream_t> streams;  // of stream_create
};

namespace {

// Every slot but open: the device is current, and what the body throws becomes a status.
template <class Body>
strata_status call(strata_device* self, const char* what, Body&& body) {
  return guard(self->host, what, [&] {
    const Context::Scope scope(self->context);
    body();
  });
}

// The slots that cannot fail say what was wrong in the log.
template <class Body>
void call_void(strata_device* self, const char* what, Body&& body) {
  const Error error = attempt([&] {
    const Context::Scope scope(self->context);
    body();
  });
  if (error.ok()) return;
  self->host->log(self->host->ctx, STRATA_LOG_HOST_MISBEHAVING, "device_cuda", join(what, ": ", error.text()).c_str());
}

Work work_on(strata_device* self, const strata_stream* stream) {
  return strata::cuda_kit::work_on(stream, self->own, self->context.ordinal());
}

void wait(cudaStream_t stream, const char* what) { check(cudaStreamSynchronize(stream), "waiting for ", what); }

// The end of a call that enqueued work.
void finish(const Work& work, const char* what) {
  if (work.wait) wait(work.stream, what);
}

uint64_t read_bytes(const Options& options, const char* key) {
  const int64_t bytes = options.integer(key, 0);
  if (bytes < 0) raise(STRATA_INVALID_ARGUMENT, "option ", key, " = ", bytes, ", 0 (no limit) or more is right");
  return static_cast<uint64_t>(bytes);
}

// CUDA loads code at its first use and may wait for an idle device there: all of it is used once, now.
void load_everything(strata_device* self) {
  check(load_kernels(), "loading the kernels");
  const Scratch scratch(self->memory.pool(), 2 * kAlignment, self->own);
  char* memory = static_cast<char*>(scratch.data());
  check(cudaMemsetAsync(memory, 0, kAlignment, self->own), "first fill");
  check(cudaMemcpyAsync(memory + kAlignment, memory, kAlignment, cudaMemcpyDefault, self->own), "first copy");
  wait(self->own, "the first fill and copy");
}

strata_status STRATA_CALL device_open(const strata_open_args* args, strata_device** out) {
  const strata_host* host = args->host;
  return guard(host, "device_cuda open", [&] {
    const Options options(args->options);
    const uint64_t memory_budget = read_bytes(options, "memory_budget");
    const uint64_t pinned_budget = read_bytes(options, "pinned_budget");
    const auto* sync = host_interface<strata_sync_api>(host, STRATA_HOST_SYNC);
    if (!sync) raise(STRATA_FAILED_PRECONDITION, "the host has no " STRATA_HOST_SYNC);
    const Context context = Context::open(options.integer("device_id", -1), args->local_rank);
    const Context::Scope scope(context);
    auto self = std::make_unique<strata_device>(host, sync, context, memory_budget, pinned_budget);
    check(cudaStreamCreateWithFlags(&self->own, cudaStreamNonBlocking), "a stream on GPU ", context.ordinal());
    load_everything(self.get());
    *out = self.release();
  });
}

void STRATA_CALL device_close(strata_device* self) {
  const Context context = self->context;  // outlives what it is current for
  const Context::Scope scope(context);
  cudaStreamSynchronize(self->own);
  delete self;
}

strata_status STRATA_CALL device_caps(strata_device* self, strata_device_caps* out) {
  return call(self, "device_cuda caps", [&] {
    const Memory::Bytes bytes = self->memory.device_bytes();
    out->type = STRATA_CUDA;
    out->device_id = self->context.ordinal();
    out->flags = 0;
    out->alignment = kAlignment;
    out->total_bytes = bytes.total;
    out->free_bytes = bytes.free;
  });
}

// --- memory -----------------------------------------------------------------------------------------------------

strata_status STRATA_CALL device_alloc(strata_device* self, uint64_t bytes, void** out) {
  *out = nullptr;
  return call(self, "device_cuda alloc", [&] { *out = self->memory.allocate(bytes); });
}

void foreign(const char* giver) {
  raise(STRATA_INVALID_ARGUMENT, "not a pointer that ", giver, " gave, or freed before: ignored");
}

void STRATA_CALL device_free(strata_device* self, void* ptr) {
  call_void(self, "device_cuda free", [&] {
    if (ptr && !self->memory.release(ptr)) foreign("alloc");
  });
}

strata_status STRATA_CALL device_alloc_pinned(strata_device* self, uint64_t bytes, void** out) {
  *out = nullptr;
  return call(self, "device_cuda alloc_pinned", [&] { *out = self->memory.allocate_pinned(bytes); });
}

void STRATA_CALL device_free_pinned(strata_device* self, void* ptr) {
  call_void(self, "device_cuda free_pinned", [&] {
    if (ptr && !self->memory.release_pinned(ptr)) foreign("alloc_pinned");
  });
}

// --- operations -------------------------------------------------------------------------------------------------

void need(const void* ptr, const char* name, uint64_t count, const char* unit) {
  if (!ptr && count > 0) raise(STRATA_INVALID_ARGUMENT, name, " is NULL for ", count, " ", unit);
}

void need_float(strata_dtype dtype) {
  if (is_float(dtype)) return;
  raise(STRATA_INVALID_ARGUMENT, "dtype ", dtype, " is not F32 (1), BF16 (2) or F16 (3)");
}

// The operands of a kernel over `count` elements. `also` is a second pointer that must be there.
void need_source(strata_device* self, const void* src, uint64_t count, const void* also, const char* name) {
  need(also, name, count, "elements");
  need(src, "src", count, "elements");
  if (count > 0) require_reach(src, self->context.ordinal(), "src");
}
void need_operands(strata_device* self, const void* dst, const void* src, uint64_t count) {
  need_source(self, src, count, dst, "dst");
  if (count > 0) require_reach(dst, self->context.ordinal(), "dst");
}

strata_status STRATA_CALL device_copy(strata_device* self, void* dst, const void* src, uint64_t bytes,
                                      const strata_stream* stream) {
  return call(self, "device_cuda copy", [&] {
    const Work work = work_on(self, stream);
    need(dst, "dst", bytes, "bytes");
    need(src, "src", bytes, "bytes");
    if (bytes == 0) return;
    check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, work.stream), bytes, " bytes from ", src, " to ", dst);
    finish(work, "a copy");
  });
}

strata_status STRATA_CALL device_fill(strata_device* self, void* dst, uint8_t value, uint64_t bytes,
                                      const strata_stream* stream) {
  return call(self, "device_cuda fill", [&] {
    const Work work = work_on(self, stream);
    need(dst, "dst", bytes, "bytes");
    if (bytes == 0) return;
    if (!kernels_reach(dst, self->context.ordinal())) {  // ordinary host memory, in its turn
      wait(work.stream, "work before a fill of host memory");
      std::memset(dst, value, bytes);
      return;
    }
    check(cudaMemsetAsync(dst, value, bytes, work.stream), bytes, " bytes at ", dst);
    finish(work, "a fill");
  });
}

strata_status STRATA_CALL device_cast(strata_device* self, void* dst, strata_dtype dst_dtype, const void* src,
                                      strata_dtype src_dtype, uint64_t count, strata_rounding rounding,
                                      const strata_stream* stream) {
  return call(self, "device_cuda cast", [&] {
    need_float(src_dtype);
    need_float(dst_dtype);
    if (rounding != STRATA_ROUND_EVEN && rounding != STRATA_ROUND_AWAY) {
      raise(STRATA_INVALID_ARGUMENT, "rounding ", rounding, " is neither EVEN (0) nor AWAY (1)");
    }
    const Work work = work_on(self, stream);
    need_operands(self, dst, src, count);
    check(launch_cast(dst, dst_dtype, src, src_dtype, count, rounding, work.stream), count, " elements of ",
          dtype_name(src_dtype), " to ", dtype_name(dst_dtype));
    finish(work, "a cast");
  });
}

strata_status STRATA_CALL device_accumulate(strata_device* self, float* dst, const void* src, strata_dtype src_dtype,
                                            uint64_t count, const strata_stream* stream) {
  return call(self, "device_cuda accumulate", [&] {
    need_float(src_dtype);
    const Work work = work_on(self, stream);
    need_operands(self, dst, src, count);
    check(launch_accumulate(dst, src, src_dtype, count, work.stream), count, " elements of ", dtype_name(src_dtype));
    finish(work, "an accumulation");
  });
}

void need_blocks(uint64_t count) {
  if (count % STRATA_NORM_BLOCK != 0) {
    raise(STRATA_INVALID_ARGUMENT, count, " elements are not a multiple of ", STRATA_NORM_BLOCK);
  }
}

// Enqueues sums of squares; waits for the stream where a kernel cannot write to `sums`.
void square(strata_device* self, const void* src, strata_dtype dtype, uint64_t count, double* sums, const Work& work) {
  if (count == 0) return;
  const auto launch = [&](double* out) {
    check(launch_square_sums(out, src, dtype, count, work.stream), count, " elements of ", dtype_name(dtype));
  };
  if (reinterpret_cast<uintptr_t>(sums) % 8 == 0 && kernels_reach(sums, self->context.ordinal())) return launch(sums);
  const uint64_t bytes = count / STRATA_NORM_BLOCK * sizeof(double);
  const Scratch staged(self->memory.pool(), bytes, work.stream);
  launch(static_cast<double*>(staged.data()));
  check(cudaMemcpyAsync(sums, staged.data(), bytes, cudaMemcpyDefault, work.stream), bytes, " bytes of sums");
  wait(work.stream, "sums of squares");
}

strata_status STRATA_CALL device_fold(strata_device* self, const strata_fold_item* items, uint64_t count,
                                      uint32_t stride, const strata_stream* stream) {
  return call(self, "device_cuda fold", [&] {
    const Work work = work_on(self, stream);
    const auto item_at = [=](uint64_t i) -> const strata_fold_item& {
      return *reinterpret_cast<const strata_fold_item*>(reinterpret_cast<const char*>(items) + i * stride);
    };
    for (uint64_t i = 0; i < count; ++i) {
      const strata_fold_item& item = item_at(i);
      need_float(item.src_dtype);
      need_float(item.dst_dtype);
      if (item.adds != 0 && item.dst_dtype != STRATA_F32) {
        raise(STRATA_INVALID_ARGUMENT, "item ", i, " adds to ", dtype_name(item.dst_dtype), ", only F32 (1) adds");
      }
      need_operands(self, item.dst, item.src, item.count);
      if (item.squares) need_blocks(item.count);
    }
    check(launch_fold(items, count, stride, work.stream), count, " arrays");
    for (uint64_t i = 0; i < count; ++i) {
      const strata_fold_item& item = item_at(i);
      if (item.squares) square(self, item.dst, item.dst_dtype, item.count, item.squares, work);
    }
    finish(work, "a fold");
  });
}

strata_status STRATA_CALL device_square_sums(strata_device* self, const void* src, strata_dtype dtype, uint64_t count,
                                             double* sums, const strata_stream* stream) {
  return call(self, "device_cuda square_sums", [&] {
    need_float(dtype);
    need_blocks(count);
    const Work work = work_on(self, stream);
    need_source(self, src, count, sums, "sums");
    square(self, src, dtype, count, sums, work);
    finish(work, "sums of squares");
  });
}

strata_status STRATA_CALL device_find_nonfinite(strata_device* self, const void* src, strata_dtype dtype,
                                                uint64_t count, int64_t* index, const strata_stream* stream) {
  return call(self, "device_cuda find_nonfinite", [&] {
    need_float(dtype);
    const Work work = work_on(self, stream);
    need(index, "index", 1, "result");
    need_source(self, src, count, index, "index");
    const Scratch first(self->memory.pool(), sizeof(uint64_t), work.stream);
    check(cudaMemsetAsync(first.data(), 0xFF, sizeof(uint64_t), work.stream), "fill of the result");
    check(launch_find_nonfinite(static_cast<uint64_t*>(first.data()), src, dtype, count, work.stream), count,
          " elements of ", dtype_name(dtype));
    // All ones, as no element leaves it, is -1.
    check(cudaMemcpyAsync(index, first.data(), sizeof(*index), cudaMemcpyDefault, work.stream), "copy of the result");
    wait(work.stream, "the search for inf and NaN");
  });
}

// --- streams ----------------------------------------------------------------------------------------------------

strata_status STRATA_CALL device_stream_create(strata_device* self, int32_t priority, strata_stream* out) {
  return call(self, "device_cuda stream_create", [&] {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "range of stream priorities");
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, std::clamp(int{priority}, greatest, least)),
          "a stream of priority ", priority);
    {
      std::lock_guard lock(self->mutex);
      self->streams.insert(stream);
    }
    *out = {sizeof(*out), STRATA_ABI_MINOR, STRATA_CUDA, self->context.ordinal(), stream};
  });
}

void STRATA_CALL device_stream_destroy(strata_device* self, strata_stream* stream) {
  call_void(self, "device_cuda stream_destroy", [&] {
    if (!stream || !stream->native) return;
    auto* native = static_cast<cudaStream_t>(stream->native);
    {
      std::lock_guard lock(self->mutex);
      if (self->streams.erase(native) == 0) foreign("stream_create");
    }
    stream->native = nullptr;
    check(cudaStreamDestroy(native), "a stream");
  });
}

strata_status STRATA_CALL device_stream_wait_host(strata_device* self, const strata_stream* stream) {
  return call(self, "device_cuda stream_wait_host", [&] { wait(work_on(self, stream).stream, "a stream"); });
}

strata_status STRATA_CALL device_stream_record(strata_device* self, const strata_stream* stream, strata_event* event) {
  return call(self, "device_cuda stream_record", [&] {
    need(event, "event", 1, "event");
    set_when_done(work_on(self, stream).stream, self->sync, event, "device_cuda: work of a stream");
  });
}

// --- markers ----------------------------------------------------------------------------------------------------

strata_status create_marker(strata_device* self, const char* what, unsigned flags, strata_marker** out) {
  return call(self, what, [&] {
    auto marker = std::make_unique<strata_marker>();
    // A thread that waits leaves its core to the others: updates on the CPU need them.
    check(cudaEventCreateWithFlags(&marker->event, flags | cudaEventBlockingSync), "an event");
    *out = marker.release();
  });
}

strata_status STRATA_CALL device_marker_create(strata_device* self, strata_marker** out) {
  return create_marker(self, "device_cuda marker_create", cudaEventDisableTiming, out);
}

strata_status STRATA_CALL device_marker_create_timed(strata_device* self, strata_marker** out) {
  return create_marker(self, "device_cuda marker_create_timed", cudaEventDefault, out);
}

strata_status STRATA_CALL device_marker_elapsed(strata_device* self, strata_marker* from, strata_marker* to,
                                                int64_t* ns) {
  bool reached = false;
  const strata_status status = call(self, "device_cuda marker_elapsed", [&] {
    need(from, "from", 1, "marker");
    need(to, "to", 1, "marker");
    float ms = 0;
    const cudaError_t error = cudaEventElapsedTime(&ms, from->event, to->event);
    reached = error != cudaErrorNotReady;
    if (!reached) return void(cudaGetLastError());  // it is no error, and must not be found as one later
    check(error, "time between two markers");
    *ns = static_cast<int64_t>(static_cast<double>(ms) * 1e6);
  });
  return status == STRATA_OK && !reached ? STRATA_AGAIN : status;
}

void STRATA_CALL device_marker_destroy(strata_device* self, strata_marker* marker) {
  call_void(self, "device_cuda marker_destroy", [&] {
    if (!marker) return;
    const std::unique_ptr<strata_marker> owned(marker);
    check(cudaEventDestroy(marker->event), "an event");
  });
}

strata_status STRATA_CALL device_marker_record(strata_device* self, strata_marker* marker,
                                               const strata_stream* stream) {
  return call(self, "device_cuda marker_record", [&] {
    need(marker, "marker", 1, "marker");
    check(cudaEventRecord(marker->event, work_on(self, stream).stream), "an event");
  });
}

strata_status STRATA_CALL device_stream_wait_marker(strata_device* self, const strata_stream* stream,
                                                    strata_marker* marker) {
  return call(self, "device_cuda stream_wait_marker", [&] {
    need(marker, "marker", 1, "marker");
    const Work work = work_on(self, stream);
    check(cudaStreamWaitEvent(work.stream, marker->event, 0), "an event");
    finish(work, "a marker");
  });
}

strata_status STRATA_CALL device_marker_wait_host(strata_device* self, strata_marker* marker) {
  return call(self, "device_cuda marker_wait_host", [&] {
    need(marker, "marker", 1, "marker");
    check(cudaEventSynchronize(marker->event), "waiting for a marker");
  });
}

// --- the plugin -------------------------------------------------------------------------------------------------

const strata_device_api* device_table() {
  static const strata_device_api table = [] {
    strata_device_api t{};
    t.struct_size = sizeof(t);
    t.abi_minor = STRATA_ABI_MINOR;
    t.open = device_open;
    t.close = device_close;
    t.caps = device_caps;
    t.alloc = device_alloc;
    t.free = device_free;
    t.alloc_pinned = device_alloc_pinned;
    t.free_pinned = device_free_pinned;
    t.copy = device_copy;
    t.fill = device_fill;
    t.cast = device_cast;
    t.accumulate = device_accumulate;
    t.square_sums = device_square_sums;
    t.find_nonfinite = device_find_nonfinite;
    t.stream_create = device_stream_create;
    t.stream_destroy = device_stream_destroy;
    t.stream_wait_host = device_stream_wait_host;
    t.stream_record = device_stream_record;
    t.marker_create = device_marker_create;
    t.marker_destroy = device_marker_destroy;
    t.marker_record = device_marker_record;
    t.stream_wait_marker = device_stream_wait_marker;
    t.marker_wait_host = device_marker_wait_host;
    t.marker_create_timed = device_marker_create_timed;
    t.marker_elapsed = device_marker_elapsed;
    t.fold = device_fold;
    return t;
  }();
  return &table;
}

const void* STRATA_CALL get_interface(const char* id) {
  return id && std::strcmp(id, STRATA_DEVICE) == 0 ? device_table() : nullptr;
}

}  // namespace

const strata_plugin* STRATA_CALL strata_plugin_entry_v1(uint32_t) {
  static const strata_plugin descriptor = {sizeof(descriptor), STRATA_ABI_MINOR, "device_cuda", "0.1.0", get_interface};
  return &descriptor;
}
