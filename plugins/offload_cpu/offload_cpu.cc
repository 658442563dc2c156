// offload_cpu.cc - strata.offload/1 in host RAM: the tier whose bytes are simply addresses.
//
// The core works in place through `map`, so `read` and `write` are for those who treat all tiers alike; they are
// copies done when the call returns (the done event is set inside the call), spread over the rank's threads.
// Regions, budgets and page-locked memory are in regions.h.
//
// Threads: caps and map run beside everything; the rest as the header says. The bytes of a region are the caller's:
// transfers of overlapping ranges are ordered by the caller.
#include <algorithm>
#include <cstring>

#include "plugin_kit/io_range.h"
#include "plugin_kit/parallel.h"
#include "plugin_kit/plugin_kit.h"
#include "regions.h"
#include "strata/plugin.h"

using strata::offload_cpu::Budgets;
using strata::offload_cpu::Region;
using strata::offload_cpu::Regions;
using strata::plugin_kit::fail;
using strata::plugin_kit::guard;
using strata::plugin_kit::host_interface;
using strata::plugin_kit::Options;

struct strata_offload {
  const strata_host* host;
  const strata_executor_api* executor;
  const strata_sync_api* sync;
  Regions regions;
};

namespace {

constexpr uint64_t kPiece = uint64_t{1} << 20;  // bytes a thread copies at a time

strata_status read_budgets(const strata_host* host, const Options& options, Budgets* out) {
  const int64_t bytes = options.integer("budget_bytes", 0);
  const int64_t pinned = options.integer("pinned_budget_bytes", -1);
  if (bytes < 0) {
    return fail(host, STRATA_INVALID_ARGUMENT,
                "offload_cpu: option budget_bytes = " + std::to_string(bytes) + "; 0 (no limit) or more is right");
  }
  if (pinned < -1) {
    return fail(host, STRATA_INVALID_ARGUMENT,
                "offload_cpu: option pinned_budget_bytes = " + std::to_string(pinned) +
                    "; -1 (as budget_bytes), 0 (none) or more is right");
  }
  out->bytes = bytes == 0 ? UINT64_MAX : static_cast<uint64_t>(bytes);
  out->pinned_bytes = pinned == -1 ? out->bytes : static_cast<uint64_t>(pinned);
  out->pin = options.flag("pin_memory", false);
  return STRATA_OK;
}

strata_status STRATA_CALL offload_open(const strata_open_args* args, strata_offload** out) {
  const strata_host* host = args->host;
  return guard(host, "offload_cpu open", [&]() -> strata_status {
    Budgets budgets;
    if (strata_status code = read_budgets(host, Options(args->options), &budgets)) return code;
    auto* executor = host_interface<strata_executor_api>(host, STRATA_HOST_EXECUTOR);
    auto* sync = host_interface<strata_sync_api>(host, STRATA_HOST_SYNC);
    if (!executor || !sync) {
      return fail(host, STRATA_FAILED_PRECONDITION,
                  "offload_cpu: the host lacks " STRATA_HOST_EXECUTOR " or " STRATA_HOST_SYNC);
    }
    *out = new strata_offload{host, executor, sync,
                              Regions(host, budgets, static_cast<const strata_device_api*>(args->device),
                                      static_cast<strata_device*>(args->device_self))};
    return STRATA_OK;
  });
}

void STRATA_CALL offload_close(strata_offload* self) { delete self; }

strata_status STRATA_CALL offload_caps(strata_offload* self, strata_offload_caps* out) {
  out->flags = STRATA_OFFLOAD_ADDRESSABLE;
  out->io_alignment = 1;
  out->max_inflight = UINT32_MAX;  // a transfer is done when its call returns: none ever waits
  out->budget_bytes = self->regions.budget();
  out->used_bytes = self->regions.used();
  out->pinned_bytes = self->regions.pinned();
  return STRATA_OK;
}

strata_status STRATA_CALL offload_alloc_for(strata_offload* self, uint64_t bytes, uint32_t flags, const char* label,
                                            strata_region* out) {
  const bool may_pin = (flags & STRATA_REGION_HOST_ONLY) == 0;
  return guard(self->host, "offload_cpu alloc", [&] { return self->regions.make(bytes, may_pin, label, out); });
}

strata_status STRATA_CALL offload_alloc(strata_offload* self, uint64_t bytes, const char* label, strata_region* out) {
  return offload_alloc_for(self, bytes, 0, label, out);
}

void STRATA_CALL offload_free(strata_offload* self, strata_region region) {
  guard(self->host, "offload_cpu free", [&]() -> strata_status {
    self->regions.drop(region);
    return STRATA_OK;
  });
}

strata_status find(strata_offload* self, const char* operation, strata_region id, Region* out) {
  if (self->regions.find(id, out)) return STRATA_OK;
  return fail(self->host, STRATA_NOT_FOUND,
              std::string("offload_cpu ") + operation + ": no region " + std::to_string(id));
}

strata_status STRATA_CALL offload_map(strata_offload* self, strata_region id, void** out) {
  return guard(self->host, "offload_cpu map", [&]() -> strata_status {
    Region region;
    if (strata_status code = find(self, "map", id, &region)) return code;
    *out = region.data;
    return STRATA_OK;
  });
}

void copy(strata_offload* self, char* dst, const char* src, uint64_t bytes) {
  strata::plugin_kit::for_parts(self->executor, self->host->ctx, bytes, kPiece,
                                [&](uint64_t begin, uint64_t n) { std::memcpy(dst + begin, src + begin, n); });
}

strata_status transfer(strata_offload* self, const char* operation, const strata_io_args* io, strata_event* done,
                       bool to_region) {
  return guard(self->host, operation, [&]() -> strata_status {
    Region region;
    if (strata_status code = find(self, operation, io->region, &region)) return code;
    const strata::plugin_kit::Error wrong = strata::plugin_kit::check_range(*io, region.bytes);
    if (!wrong.ok()) {
      return fail(self->host, wrong.code(),
                  std::string("offload_cpu ") + operation + " \"" + region.label + "\": " + wrong.text());
    }
    char* here = region.data + io->offset;
    char* there = static_cast<char*>(io->buffer);
    copy(self, to_region ? here : there, to_region ? there : here, io->bytes);
    if (done) self->sync->set(done, STRATA_OK, nullptr);
    return STRATA_OK;
  });
}

strata_status STRATA_CALL offload_read(strata_offload* self, const strata_io_args* args, strata_event* done) {
  return transfer(self, "read", args, done, false);
}

strata_status STRATA_CALL offload_write(strata_offload* self, const strata_io_args* args, strata_event* done) {
  return transfer(self, "write", args, done, true);
}

const strata_offload_api offload_table = {
    sizeof(strata_offload_api),
    STRATA_ABI_MINOR,
    offload_open,
    offload_close,
    offload_caps,
    offload_alloc,
    offload_free,
    offload_map,
    offload_read,
    offload_write,
    nullptr,  // register_memory: copies between memory gain nothing by it
    nullptr,
    offload_alloc_for,
};

const void* STRATA_CALL get_interface(const char* id) {
  return std::strcmp(id, STRATA_OFFLOAD) == 0 ? &offload_table : nullptr;
}

}  // namespace

const strata_plugin* STRATA_CALL strata_plugin_entry_v1(uint32_t) {
  static const strata_plugin descriptor = {sizeof(descriptor), STRATA_ABI_MINOR, "offload_cpu", "0.1.0", get_interface};
  return &descriptor;
}
