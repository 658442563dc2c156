// device_host.cc - strata.device/1 on plain memory and the rank's threads: the core needs no GPU to run.
//
// Memory is the host's (flag HOST_COHERENT), so a copy between "device" and host is a memcpy. Every operation is done
// when its call returns; the stream argument only has to be a CPU one. Long ranges are cut into blocks at fixed
// places and spread over the host executor; each element's result depends on that element alone, or on its own norm
// block, so neither the number of threads nor the instruction set can change a bit.
//
// The host program may run with flush-to-zero set and workers inherit that: each block sets the default floating
// point environment for itself and puts the old one back.
//
// Threads: all operations may run at once; a mutex guards the list of allocations and nothing else. alloc_pinned and
// the stream calls are left out: page-locking means nothing here, and the host's defaults are right for CPU streams.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "host_memory/host_memory.h"
#include "host_memory/limits.h"
#include "kernels.h"
#include "numbers/float_environment.h"
#include "plugin_kit/dtypes.h"
#include "plugin_kit/plugin_kit.h"
#include "strata/iface/device.h"
#include "strata/plugin.h"

using strata::device_host::Kernels;
using strata::plugin_kit::fail;
using strata::plugin_kit::guard;
using strata::plugin_kit::is_float;
using strata::plugin_kit::Options;
using strata::plugin_kit::size_of;
namespace host_memory = strata::host_memory;

struct strata_device {
  const strata_host* host;
  const strata_executor_api* executor;
  const Kernels* kernels;
  std::mutex mutex;
  std::unordered_map<void*, uint64_t> allocations;  // address to bytes
};

namespace {

constexpr uint64_t kBlock = 65536;                  // elements per task; a multiple of STRATA_NORM_BLOCK
constexpr uint64_t kByteBlock = uint64_t{1} << 20;  // bytes per task of copy and fill
static_assert(kBlock % STRATA_NORM_BLOCK == 0);
// Fp32 results of one call that the caches would not hold until they are read: such gradients are written past them.
constexpr uint64_t kPastCaches = uint64_t{8} << 20;

// Runs body(begin, count) over [0, total) in pieces of `block`.
template <class Body>
void in_blocks(strata_device* self, uint64_t total, uint64_t block, Body body) {
  struct Job {
    Body& body;
    uint64_t total, block;
    static void run(void* arg, uint64_t i) {
      Job& job = *static_cast<Job*>(arg);
      job.body(i * job.block, std::min(job.block, job.total - i * job.block));
    }
  } job{body, total, block};
  if (total == 0) return;
  const uint64_t pieces = (total - 1) / block + 1;
  if (pieces == 1) {
    body(0, total);
  } else {
    self->executor->parallel_for(self->host->ctx, pieces, Job::run, &job);
  }
}

template <class Body>
void in_float_blocks(strata_device* self, uint64_t count, Body body) {
  in_blocks(self, count, kBlock, [&](uint64_t begin, uint64_t n) {
    const strata::numbers::FloatEnvironment environment;
    body(begin, n);
  });
}

int index_of(strata_dtype dtype) { return dtype - STRATA_F32; }
const char* at(const void* base, uint64_t bytes) { return static_cast<const char*>(base) + bytes; }
char* at(void* base, uint64_t bytes) { return static_cast<char*>(base) + bytes; }

strata_status bad_argument(strata_device* self, const char* operation, const std::string& text) {
  return fail(self->host, STRATA_INVALID_ARGUMENT, std::string("device_host ") + operation + ": " + text);
}

strata_status check_stream(strata_device* self, const char* operation, const strata_stream* stream) {
  if (!stream || stream->domain == STRATA_CPU) return STRATA_OK;
  return bad_argument(
      self, operation,
      "the stream is of device type " + std::to_string(stream->domain) + ", this device is the CPU (1)");
}

// What every operation on numbers needs of its arguments.
strata_status check_numbers(strata_device* self, const char* operation, strata_dtype dtype, uint64_t count,
                            const void* first, const void* second, const strata_stream* stream) {
  if (!is_float(dtype)) {
    return bad_argument(self, operation, "dtype " + std::to_string(dtype) + " is not F32 (1), BF16 (2) or F16 (3)");
  }
  if (count > 0 && (!first || !second)) {
    return bad_argument(self, operation, "NULL pointer for " + std::to_string(count) + " elements");
  }
  return check_stream(self, operation, stream);
}

// What is squared is whole blocks of the norm.
strata_status check_blocks(strata_device* self, const char* operation, uint64_t count) {
  if (count % STRATA_NORM_BLOCK == 0) return STRATA_OK;
  return bad_argument(self, operation, std::to_string(count) + " elements are not a multiple of 2048");
}

strata_status STRATA_CALL device_open(const strata_open_args* args, strata_device** out) {
  const strata_host* host = args->host;
  return guard(host, "device_host open", [&]() -> strata_status {
    const std::string isa = Options(args->options).text("isa", "auto");
    const Kernels* kernels = strata::device_host::select_kernels(isa.c_str());
    if (!kernels && (isa == "avx2" || isa == "avx512")) {
      return fail(host, STRATA_FAILED_PRECONDITION,
                  "device_host: option isa = \"" + isa + "\", but this processor cannot run it; \"auto\" always works");
    }
    if (!kernels) {
      return fail(host, STRATA_INVALID_ARGUMENT,
                  "device_host: option isa = \"" + isa + "\" is none of auto, scalar, avx2, avx512");
    }
    auto* executor = static_cast<const strata_executor_api*>(host->get_interface(host->ctx, STRATA_HOST_EXECUTOR));
    if (!executor) return fail(host, STRATA_FAILED_PRECONDITION, "device_host: the host has no " STRATA_HOST_EXECUTOR);
    *out = new strata_device{host, executor, kernels, {}, {}};
    host->log(host->ctx, STRATA_LOG_DEBUG, "device_host", (std::string("kernels: ") + kernels->isa).c_str());
    return STRATA_OK;
  });
}

void STRATA_CALL device_close(strata_device* self) {
  for (const auto& [ptr, bytes] : self->allocations) host_memory::release(ptr, bytes);
  delete self;
}

strata_status STRATA_CALL device_caps(strata_device* self, strata_device_caps* out) {
  return guard(self->host, "device_host caps", [&]() -> strata_status {
    const host_memory::Limits limits = host_memory::read_limits();
    out->type = STRATA_CPU;
    out->device_id = 0;
    out->flags = STRATA_DEVICE_HOST_COHERENT;
    out->alignment = host_memory::kAlignment;
    out->total_bytes = limits.total_bytes;
    out->free_bytes = limits.free_bytes;
    return STRATA_OK;
  });
}

strata_status STRATA_CALL device_alloc(strata_device* self, uint64_t bytes, void** out) {
  return guard(self->host, "device_host alloc", [&]() -> strata_status {
    *out = nullptr;
    if (bytes == 0) return STRATA_OK;
    void* ptr = host_memory::allocate(bytes);
    if (!ptr) {
      const host_memory::Limits limits = host_memory::read_limits();
      return fail(self->host, STRATA_RESOURCE_EXHAUSTED,
                  "device_host alloc: " + std::to_string(bytes) + " bytes wanted, " +
                      std::to_string(limits.free_bytes) + " of " + std::to_string(limits.total_bytes) + " free");
    }
    try {
      std::lock_guard lock(self->mutex);
      self->allocations.emplace(ptr, bytes);
    } catch (...) {
      host_memory::release(ptr, bytes);
      throw;
    }
    *out = ptr;
    return STRATA_OK;
  });
}

void STRATA_CALL device_free(strata_device* self, void* ptr) {
  if (!ptr) return;
  uint64_t bytes = 0;
  {
    std::lock_guard lock(self->mutex);
    auto found = self->allocations.find(ptr);
    if (found != self->allocations.end()) {
      bytes = found->second;
      self->allocations.erase(found);
    }
  }
  if (bytes == 0) {
    self->host->log(self->host->ctx, STRATA_LOG_HOST_MISBEHAVING, "device_host",
                    "free of a pointer that alloc did not give, or that was freed before: ignored");
    return;
  }
  host_memory::release(ptr, bytes);
}

strata_status STRATA_CALL device_copy(strata_device* self, void* dst, const void* src, uint64_t bytes,
                                      const strata_stream* stream) {
  return guard(self->host, "device_host copy", [&]() -> strata_status {
    if (strata_status code = check_stream(self, "copy", stream)) return code;
    if (bytes > 0 && (!dst || !src)) return bad_argument(self, "copy", "NULL for " + std::to_string(bytes) + " bytes");
    in_blocks(self, bytes, kByteBlock,
              [=](uint64_t begin, uint64_t n) { std::memcpy(at(dst, begin), at(src, begin), n); });
    return STRATA_OK;
  });
}

strata_status STRATA_CALL device_fill(strata_device* self, void* dst, uint8_t value, uint64_t bytes,
                                      const strata_stream* stream) {
  return guard(self->host, "device_host fill", [&]() -> strata_status {
    if (strata_status code = check_stream(self, "fill", stream)) return code;
    if (bytes > 0 && !dst) return bad_argument(self, "fill", "NULL for " + std::to_string(bytes) + " bytes");
    in_blocks(self, bytes, kByteBlock, [=](uint64_t begin, uint64_t n) { std::memset(at(dst, begin), value, n); });
    return STRATA_OK;
  });
}

strata_status STRATA_CALL device_cast(strata_device* self, void* dst, strata_dtype dst_dtype, const void* src,
                                      strata_dtype src_dtype, uint64_t count, strata_rounding rounding,
                                      const strata_stream* stream) {
  return guard(self->host, "device_host cast", [&]() -> strata_status {
    if (strata_status code = check_numbers(self, "cast", src_dtype, count, src, dst, stream)) return code;
    if (strata_status code = check_numbers(self, "cast", dst_dtype, count, src, dst, stream)) return code;
    if (rounding != STRATA_ROUND_EVEN && rounding != STRATA_ROUND_AWAY) {
      return bad_argument(self, "cast", "rounding " + std::to_string(rounding) + " is neither EVEN (0) nor AWAY (1)");
    }
    auto* kernel = self->kernels->cast[index_of(src_dtype)][index_of(dst_dtype)][rounding];
    in_float_blocks(self, count, [=](uint64_t begin, uint64_t n) {
      kernel(at(dst, begin * size_of(dst_dtype)), at(src, begin * size_of(src_dtype)), n);
    });
    return STRATA_OK;
  });
}

strata_status STRATA_CALL device_accumulate(strata_device* self, float* dst, const void* src, strata_dtype src_dtype,
                                            uint64_t count, const strata_stream* stream) {
  return guard(self->host, "device_host accumulate", [&]() -> strata_status {
    if (strata_status code = check_numbers(self, "accumulate", src_dtype, count, src, dst, stream)) return code;
    auto* kernel = self->kernels->accumulate[index_of(src_dtype)];
    in_float_blocks(self, count, [=](uint64_t begin, uint64_t n) {
      kernel(at(static_cast<void*>(dst), begin * 4), at(src, begin * size_of(src_dtype)), n);
    });
    return STRATA_OK;
  });
}

const strata_fold_item& item_at(const strata_fold_item* items, uint64_t stride, size_t i) {
  return *reinterpret_cast<const strata_fold_item*>(at(static_cast<const void*>(items), i * stride));
}

strata_status check_item(strata_device* self, const strata_fold_item& item, const strata_stream* stream) {
  for (strata_dtype dtype : {item.src_dtype, item.dst_dtype}) {
    if (strata_status code = check_numbers(self, "fold", dtype, item.count, item.src, item.dst, stream)) return code;
  }
  if (strata_status code = item.squares ? check_blocks(self, "fold", item.count) : STRATA_OK) return code;
  if (item.adds == 0 || item.dst_dtype == STRATA_F32) return STRATA_OK;
  return bad_argument(self, "fold", "an item adds to dtype " + std::to_string(item.dst_dtype) + ", only F32 (1) adds");
}

bool is_only_widened(const strata_fold_item& item) {
  return item.adds == 0 && item.dst_dtype == STRATA_F32 && !item.squares;
}

// Elements [first, first + count) of an item; `first` is a multiple of the norm's block.
void fold_part(const Kernels& kernels, const strata_fold_item& item, uint64_t first, uint64_t count, bool past_caches) {
  const int from = index_of(item.src_dtype), to = index_of(item.dst_dtype);
  void* dst = at(item.dst, first * size_of(item.dst_dtype));
  const auto fold = item.adds != 0                         ? kernels.accumulate[from]
                    : past_caches && is_only_widened(item) ? kernels.widen_past_caches[from]
                                                           : kernels.cast[from][to][STRATA_ROUND_EVEN];
  fold(dst, at(item.src, first * size_of(item.src_dtype)), count);
  if (item.squares) kernels.square_sums[to](item.squares + first / STRATA_NORM_BLOCK, dst, count);
}

// Items lie one behind the other in one range, which is cut as a single array is: many small ones are one task. Each
// begins with a norm block of the range, so that no block is cut.
strata_status STRATA_CALL device_fold(strata_device* self, const strata_fold_item* items, uint64_t count,
                                      uint32_t stride, const strata_stream* stream) {
  return guard(self->host, "device_host fold", [&]() -> strata_status {
    std::vector<uint64_t> ends;
    uint64_t total = 0, widened = 0;
    for (size_t i = 0; i < count; ++i) {
      const strata_fold_item& item = item_at(items, stride, i);
      if (strata_status code = check_item(self, item, stream)) return code;
      ends.push_back(total += (item.count + STRATA_NORM_BLOCK - 1) / STRATA_NORM_BLOCK * STRATA_NORM_BLOCK);
      widened += is_only_widened(item) ? item.count * sizeof(float) : 0;
    }
    in_float_blocks(self, total, [&](uint64_t begin, uint64_t n) {
      auto i = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
      for (const uint64_t end = begin + n; begin < end; ++i) {
        const strata_fold_item& item = item_at(items, stride, i);
        const uint64_t start = i > 0 ? ends[i - 1] : 0, last = std::min(end, ends[i]);
        fold_part(*self->kernels, item, begin - start, std::min(last - start, item.count) - (begin - start),
                  widened >= kPastCaches);
        begin = last;
      }
    });
    return STRATA_OK;
  });
}

strata_status STRATA_CALL device_square_sums(strata_device* self, const void* src, strata_dtype dtype, uint64_t count,
                                             double* sums, const strata_stream* stream) {
  return guard(self->host, "device_host square_sums", [&]() -> strata_status {
    if (strata_status code = check_numbers(self, "square_sums", dtype, count, src, sums, stream)) return code;
    if (strata_status code = check_blocks(self, "square_sums", count)) return code;
    auto* kernel = self->kernels->square_sums[index_of(dtype)];
    in_float_blocks(self, count, [=](uint64_t begin, uint64_t n) {
      kernel(sums + begin / STRATA_NORM_BLOCK, at(src, begin * size_of(dtype)), n);
    });
    return STRATA_OK;
  });
}

strata_status STRATA_CALL device_find_nonfinite(strata_device* self, const void* src, strata_dtype dtype,
                                                uint64_t count, int64_t* index, const strata_stream* stream) {
  return guard(self->host, "device_host find_nonfinite", [&]() -> strata_status {
    if (strata_status code = check_numbers(self, "find_nonfinite", dtype, count, src, index, stream)) return code;
    auto* kernel = self->kernels->find_nonfinite[index_of(dtype)];
    std::atomic<uint64_t> first{UINT64_MAX};
    in_float_blocks(self, count, [&](uint64_t begin, uint64_t n) {
      if (begin > first.load(std::memory_order_relaxed)) return;  // an earlier block has one already
      const int64_t found = kernel(at(src, begin * size_of(dtype)), n);
      if (found < 0) return;
      const uint64_t hit = begin + static_cast<uint64_t>(found);
      uint64_t known = first.load(std::memory_order_relaxed);
      while (hit < known && !first.compare_exchange_weak(known, hit, std::memory_order_relaxed)) {
      }
    });
    *index = first == UINT64_MAX ? -1 : static_cast<int64_t>(first.load());
    return STRATA_OK;
  });
}

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
    t.copy = device_copy;
    t.fill = device_fill;
    t.cast = device_cast;
    t.accumulate = device_accumulate;
    t.square_sums = device_square_sums;
    t.find_nonfinite = device_find_nonfinite;
    t.fold = device_fold;
    return t;
  }();
  return &table;
}

const void* STRATA_CALL get_interface(const char* id) {
  return std::strcmp(id, STRATA_DEVICE) == 0 ? device_table() : nullptr;
}

}  // namespace

const strata_plugin* STRATA_CALL strata_plugin_entry_v1(uint32_t) {
  static const strata_plugin descriptor = {sizeof(descriptor), STRATA_ABI_MINOR, "device_host", "0.1.0", get_interface};
  return &descriptor;
}
