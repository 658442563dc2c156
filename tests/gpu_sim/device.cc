// device.cc - strata.device/1 on a simulated GPU.
//
// With a stream of this GPU an operation is enqueued and its call returns; without one, or with a CPU stream, it is
// done when the call returns, in order with nothing. Arguments are checked at the call; addresses when the work runs,
// as on a GPU, so that memory that was freed too early is found. A failure there is the device's, for good:
// stream_record, stream_wait_host, marker_wait_host and every later enqueued operation tell it.
//
// The arithmetic is device_host's: its kernels are compiled into this plugin.
#include <cstring>
#include <mutex>
#include <set>
#include <vector>

#include "gpu.h"
#include "interfaces.h"
#include "numbers/float_environment.h"
#include "plugin_kit/dtypes.h"
#include "plugins/device_host/kernels.h"

struct strata_marker {
  const bool timed;
  std::mutex mutex;
  std::shared_ptr<gpu_sim::Point> point;  // nullptr: never recorded

  std::shared_ptr<gpu_sim::Point> now() {
    std::lock_guard lock(mutex);
    return point;
  }
};

struct strata_device {
  const strata_host* host;
  const strata_sync_api* sync;
  int64_t deadline_ns;
  std::shared_ptr<gpu_sim::Gpu> gpu;
  std::mutex mutex;  // of what is open
  std::set<void*> streams;
  std::set<strata_marker*> markers;

  gpu_sim::Memory& memory() { return gpu->memory(); }
};

namespace gpu_sim {
namespace {

using strata::device_host::Kernels;
using strata::plugin_kit::attempt;
using strata::plugin_kit::guard;
using strata::plugin_kit::is_float;
using strata::plugin_kit::join;
using strata::plugin_kit::raise;
using strata::plugin_kit::size_of;

constexpr HostMemory kPinned = HostMemory::kPinned;
constexpr HostMemory kAny = HostMemory::kAny;

const Kernels& kernels() { return *strata::device_host::scalar_kernels(); }
int index_of(strata_dtype dtype) { return dtype - STRATA_F32; }

void throw_failure(const Gpu& gpu) {
  if (const Error e = gpu.failure(); !e.ok()) throw e;
}

// Does `work`, which may throw an Error, now or on the stream.
template <class Work>
void submit(strata_device* self, const char* operation, const strata_stream* given, Work work) {
  const std::shared_ptr<Stream> stream = self->gpu->find_stream(given);
  if (!stream) {  // computes as a stream's worker does, whatever mode the host program runs in
    const strata::numbers::FloatEnvironment environment;
    work();
    return;
  }
  throw_failure(*self->gpu);
  stream->push([gpu = self->gpu.get(), operation, work] {
    if (gpu->failed()) return;
    const Error e = attempt(work);
    if (!e.ok()) gpu->fail({e.code(), join("the work of an earlier call of ", operation, ": ", e.text())});
  });
}

void wait_for(strata_device* self, const strata_stream* given) {
  if (const std::shared_ptr<Stream> stream = self->gpu->find_stream(given)) stream->drain();
  throw_failure(*self->gpu);
}

void need(const void* ptr, uint64_t amount, const char* unit) {
  if (amount > 0 && !ptr) raise(STRATA_INVALID_ARGUMENT, "NULL for ", amount, " ", unit);
}

void need_float(strata_dtype dtype) {
  if (is_float(dtype)) return;
  raise(STRATA_INVALID_ARGUMENT, "dtype ", dtype, " is not F32 (1), BF16 (2) or F16 (3)");
}

void need_numbers(strata_dtype dtype, uint64_t count, const void* first, const void* second) {
  need_float(dtype);
  need(first, count, "elements");
  need(second, count, "elements");
}

// --- opening --------------------------------------------------------------------------------------------------------

strata_status STRATA_CALL device_open(const strata_open_args* args, strata_device** out) {
  return guard(args->host, "gpu_sim open", [&] {
    auto* sync = strata::plugin_kit::host_interface<strata_sync_api>(args->host, STRATA_HOST_SYNC);
    if (!sync) raise(STRATA_FAILED_PRECONDITION, "the host has no " STRATA_HOST_SYNC);
    auto gpu = Gpu::attach(args->job ? args->job : "", args->local_rank, read_settings(args->options));
    *out = new strata_device{args->host, sync, args->deadline_ns, std::move(gpu), {}, {}, {}};
  });
}

void STRATA_CALL device_close(strata_device* self) {
  for (void* native : self->streams) self->gpu->destroy_stream(native);
  for (strata_marker* marker : self->markers) delete marker;
  self->memory().free_all_of(self);
  delete self;
}

strata_status STRATA_CALL device_caps(strata_device* self, strata_device_caps* out) {
  out->type = STRATA_CUDA;
  out->device_id = self->gpu->id();
  out->flags = 0;
  out->alignment = Memory::kAlignment;
  out->total_bytes = self->memory().budget();
  out->free_bytes = self->memory().free_bytes();
  return STRATA_OK;
}

// --- memory ---------------------------------------------------------------------------------------------------------

strata_status STRATA_CALL device_alloc(strata_device* self, uint64_t bytes, void** out) {
  *out = nullptr;
  return guard(self->host, "gpu_sim alloc",
               [&] { *out = self->memory().alloc(bytes, Memory::kAlignment, 0xFF, self); });
}

strata_status STRATA_CALL device_alloc_pinned(strata_device* self, uint64_t bytes, void** out) {
  *out = nullptr;
  return guard(self->host, "gpu_sim alloc_pinned", [&] { *out = self->memory().alloc_pinned(bytes, self); });
}

void foreign_free(strata_device* self, const char* slot) {
  const std::string text = join(slot, " of a pointer that is not allocated: ignored");
  self->host->log(self->host->ctx, STRATA_LOG_HOST_MISBEHAVING, "gpu_sim", text.c_str());
}

void STRATA_CALL device_free(strata_device* self, void* ptr) {
  if (ptr && !self->memory().free(ptr)) foreign_free(self, "free");
}

void STRATA_CALL device_free_pinned(strata_device* self, void* ptr) {
  if (ptr && !self->memory().free_pinned(ptr)) foreign_free(self, "free_pinned");
}

// --- operations -----------------------------------------------------------------------------------------------------

strata_status STRATA_CALL device_copy(strata_device* self, void* dst, const void* src, uint64_t bytes,
                                      const strata_stream* stream) {
  return guard(self->host, "gpu_sim copy", [&] {
    need(dst, bytes, "bytes");
    need(src, bytes, "bytes");
    submit(self, "copy", stream, [=, memory = &self->memory()] {
      if (bytes > 0) std::memcpy(memory->resolve(dst, bytes, kAny), memory->resolve(src, bytes, kAny), bytes);
    });
  });
}

strata_status STRATA_CALL device_fill(strata_device* self, void* dst, uint8_t value, uint64_t bytes,
                                      const strata_stream* stream) {
  return guard(self->host, "gpu_sim fill", [&] {
    need(dst, bytes, "bytes");
    submit(self, "fill", stream, [=, memory = &self->memory()] {
      if (bytes > 0) std::memset(memory->resolve(dst, bytes, kPinned), value, bytes);
    });
  });
}

strata_status STRATA_CALL device_cast(strata_device* self, void* dst, strata_dtype dst_dtype, const void* src,
                                      strata_dtype src_dtype, uint64_t count, strata_rounding rounding,
                                      const strata_stream* stream) {
  return guard(self->host, "gpu_sim cast", [&] {
    need_numbers(src_dtype, count, src, dst);
    need_float(dst_dtype);
    if (rounding != STRATA_ROUND_EVEN && rounding != STRATA_ROUND_AWAY) {
      raise(STRATA_INVALID_ARGUMENT, "rounding ", rounding, " is neither EVEN (0) nor AWAY (1)");
    }
    submit(self, "cast", stream, [=, memory = &self->memory()] {
      kernels().cast[index_of(src_dtype)][index_of(dst_dtype)][rounding](
          memory->resolve(dst, count * size_of(dst_dtype), kPinned),
          memory->resolve(src, count * size_of(src_dtype), kPinned), count);
    });
  });
}

strata_status STRATA_CALL device_accumulate(strata_device* self, float* dst, const void* src, strata_dtype src_dtype,
                                            uint64_t count, const strata_stream* stream) {
  return guard(self->host, "gpu_sim accumulate", [&] {
    need_numbers(src_dtype, count, src, dst);
    submit(self, "accumulate", stream, [=, memory = &self->memory()] {
      kernels().accumulate[index_of(src_dtype)](memory->resolve(dst, count * 4, kPinned),
                                                memory->resolve(src, count * size_of(src_dtype), kPinned), count);
    });
  });
}

void need_blocks(uint64_t count) {
  if (count % STRATA_NORM_BLOCK != 0) {
    raise(STRATA_INVALID_ARGUMENT, count, " elements are not a multiple of ", STRATA_NORM_BLOCK);
  }
}

void need_item(const strata_fold_item& item) {
  need_numbers(item.src_dtype, item.count, item.src, item.dst);
  need_float(item.dst_dtype);
  if (item.adds != 0 && item.dst_dtype != STRATA_F32) {
    raise(STRATA_INVALID_ARGUMENT, "an item adds to dtype ", item.dst_dtype, ", only F32 (1) adds");
  }
  if (item.squares) need_blocks(item.count);
}

strata_status STRATA_CALL device_fold(strata_device* self, const strata_fold_item* given, uint64_t count,
                                      uint32_t stride, const strata_stream* stream) {
  return guard(self->host, "gpu_sim fold", [&] {
    std::vector<strata_fold_item> items;
    for (uint64_t i = 0; i < count; ++i) {
      need_item(items.emplace_back(
          *reinterpret_cast<const strata_fold_item*>(reinterpret_cast<const char*>(given) + i * stride)));
    }
    // A GPU gives no order to the items of a launch: here the last one goes first.
    submit(self, "fold", stream, [items = std::move(items), memory = &self->memory()] {
      for (auto item = items.rbegin(); item != items.rend(); ++item) {
        const int from = index_of(item->src_dtype), to = index_of(item->dst_dtype);
        auto* kernel = item->adds != 0 ? kernels().accumulate[from] : kernels().cast[from][to][STRATA_ROUND_EVEN];
        void* dst = memory->resolve(item->dst, item->count * size_of(item->dst_dtype), kPinned);
        kernel(dst, memory->resolve(item->src, item->count * size_of(item->src_dtype), kPinned), item->count);
        if (item->squares) kernels().square_sums[to](item->squares, dst, item->count);
      }
    });
  });
}

strata_status STRATA_CALL device_square_sums(strata_device* self, const void* src, strata_dtype dtype, uint64_t count,
                                             double* sums, const strata_stream* stream) {
  return guard(self->host, "gpu_sim square_sums", [&] {
    need_numbers(dtype, count, src, sums);
    need_blocks(count);
    if (self->memory().is_device(sums)) raise(STRATA_INVALID_ARGUMENT, "sums are in device memory");
    submit(self, "square_sums", stream, [=, memory = &self->memory()] {
      kernels().square_sums[index_of(dtype)](sums, memory->resolve(src, count * size_of(dtype), kPinned), count);
    });
  });
}

strata_status STRATA_CALL device_find_nonfinite(strata_device* self, const void* src, strata_dtype dtype,
                                                uint64_t count, int64_t* index, const strata_stream* stream) {
  return guard(self->host, "gpu_sim find_nonfinite", [&] {
    need_numbers(dtype, count, src, index);
    submit(self, "find_nonfinite", stream, [=, memory = &self->memory()] {
      *index = kernels().find_nonfinite[index_of(dtype)](memory->resolve(src, count * size_of(dtype), kPinned), count);
    });
    wait_for(self, stream);
  });
}

// --- streams --------------------------------------------------------------------------------------------------------

strata_status STRATA_CALL device_stream_create(strata_device* self, int32_t, strata_stream* out) {
  return guard(self->host, "gpu_sim stream_create", [&] {
    std::lock_guard lock(self->mutex);
    *out = self->gpu->create_stream();
    self->streams.insert(out->native);
  });
}

void STRATA_CALL device_stream_destroy(strata_device* self, strata_stream* stream) {
  if (!stream || !stream->native) return;
  {
    std::lock_guard lock(self->mutex);
    if (self->streams.erase(stream->native) == 0) return;
  }
  self->gpu->destroy_stream(stream->native);
  stream->native = nullptr;
}

strata_status STRATA_CALL device_stream_wait_host(strata_device* self, const strata_stream* stream) {
  return guard(self->host, "gpu_sim stream_wait_host", [&] { wait_for(self, stream); });
}

// A reference to a host event, given back when the last copy goes.
std::shared_ptr<strata_event> keep(const strata_sync_api* sync, strata_event* event) {
  sync->retain(event);
  return {event, sync->release};
}

strata_status STRATA_CALL device_stream_record(strata_device* self, const strata_stream* given, strata_event* event) {
  return guard(self->host, "gpu_sim stream_record", [&] {
    const auto set = [gpu = self->gpu.get(), sync = self->sync, kept = keep(self->sync, event)] {
      const Error e = gpu->failure();
      sync->set(kept.get(), e.code(), e.text().c_str());
    };
    if (const std::shared_ptr<Stream> stream = self->gpu->find_stream(given)) {
      stream->push(set);
    } else {
      set();
    }
  });
}

// --- markers --------------------------------------------------------------------------------------------------------

strata_status create_marker(strata_device* self, bool timed, strata_marker** out) {
  return guard(self->host, "gpu_sim marker_create", [&] {
    std::unique_ptr<strata_marker> marker(new strata_marker{timed, {}, {}});
    std::lock_guard lock(self->mutex);
    self->markers.insert(marker.get());
    *out = marker.release();
  });
}

strata_status STRATA_CALL device_marker_create(strata_device* self, strata_marker** out) {
  return create_marker(self, false, out);
}

strata_status STRATA_CALL device_marker_create_timed(strata_device* self, strata_marker** out) {
  return create_marker(self, true, out);
}

strata_status STRATA_CALL device_marker_elapsed(strata_device* self, strata_marker* from, strata_marker* to,
                                                int64_t* ns) {
  bool reached = false;
  const strata_status status = guard(self->host, "gpu_sim marker_elapsed", [&] {
    const std::shared_ptr<Point> first = from->now(), last = to->now();
    if (!from->timed || !to->timed || !first || !last) {
      raise(STRATA_INVALID_ARGUMENT, "a marker that is not timed, or was not recorded on a stream");
    }
    const auto begin = first->reached_at(), end = last->reached_at();
    reached = begin && end;
    if (reached) *ns = (*end - *begin).count();
  });
  return status == STRATA_OK && !reached ? STRATA_AGAIN : status;
}

void STRATA_CALL device_marker_destroy(strata_device* self, strata_marker* marker) {
  {
    std::lock_guard lock(self->mutex);
    if (self->markers.erase(marker) == 0) return;
  }
  delete marker;
}

strata_status STRATA_CALL device_marker_record(strata_device* self, strata_marker* marker, const strata_stream* given) {
  return guard(self->host, "gpu_sim marker_record", [&] {
    std::shared_ptr<Point> point;
    if (const std::shared_ptr<Stream> stream = self->gpu->find_stream(given)) {
      point = std::make_shared<Point>();
      stream->push([point] { point->reach(); });
    }
    std::lock_guard lock(marker->mutex);
    marker->point = std::move(point);
  });
}

// The point is the one of now: recording the marker again changes nothing for a stream that waits already.
strata_status STRATA_CALL device_stream_wait_marker(strata_device* self, const strata_stream* given,
                                                    strata_marker* marker) {
  return guard(self->host, "gpu_sim stream_wait_marker", [&] {
    const std::shared_ptr<Point> point = marker->now();
    const std::shared_ptr<Stream> stream = self->gpu->find_stream(given);
    if (!point) return;
    if (stream) {
      stream->push([point] { point->wait(); });
    } else {
      point->wait();
    }
  });
}

strata_status STRATA_CALL device_marker_wait_host(strata_device* self, strata_marker* marker) {
  return guard(self->host, "gpu_sim marker_wait_host", [&] {
    if (const std::shared_ptr<Point> point = marker->now()) point->wait();
    throw_failure(*self->gpu);
  });
}

// --- control --------------------------------------------------------------------------------------------------------

strata_status STRATA_CALL control_hold(strata_device* self, const strata_stream* stream, strata_event* event) {
  return guard(self->host, "gpu_sim hold", [&] {
    submit(self, "hold", stream, [sync = self->sync, ns = self->deadline_ns, kept = keep(self->sync, event)] {
      (void)sync->wait(kept.get(), ns);
      if (!sync->is_set(kept.get())) raise(STRATA_DEADLINE_EXCEEDED, "the event was not set in ", ns, " ns");
    });
  });
}

}  // namespace

const strata_device_api device_table = {
    sizeof(strata_device_api),
    STRATA_ABI_MINOR,
    device_open,
    device_close,
    device_caps,
    device_alloc,
    device_free,
    device_alloc_pinned,
    device_free_pinned,
    device_copy,
    device_fill,
    device_cast,
    device_accumulate,
    device_square_sums,
    device_find_nonfinite,
    device_stream_create,
    device_stream_destroy,
    device_stream_wait_host,
    device_stream_record,
    device_marker_create,
    device_marker_destroy,
    device_marker_record,
    device_stream_wait_marker,
    device_marker_wait_host,
    device_fold,
    device_marker_create_timed,
    device_marker_elapsed,
};

const strata_gpu_sim_control_api control_table = {sizeof(strata_gpu_sim_control_api), STRATA_ABI_MINOR, control_hold};

}  // namespace gpu_sim
