// late_failure - a collective whose every call starts well and ends, in its event, with a failure of its own.
//
// It is also the least that libs/collective_kit asks of a plugin.
#include <cstdlib>

#include "collective_kit/slots.h"
#include "strata/plugin.h"

using strata::collective_kit::Deadline;
using strata::collective_kit::Error;
using strata::collective_kit::Op;

struct strata_comm : strata::collective_kit::Comm {
  static constexpr char kName[] = "late_failure";
  Error open(const strata_open_args&) { return {}; }
  void leave() {}
  void caps(strata_collective_caps* out) const {
    out->world = out->local_world = 1;
    out->job = "";
  }
  Error alloc(uint64_t bytes, void** out) {
    *out = std::calloc(1, bytes);
    return {};
  }
  Error free(void* ptr) {
    std::free(ptr);
    return {};
  }
  Error run(Op, const strata_coll_args& args, const Deadline&, strata_event* done) {
    const std::string text = "late_failure: " + std::string(args.label) + ": the wire was cut";
    const auto* sync = strata::plugin_kit::host_interface<strata_sync_api>(host, STRATA_HOST_SYNC);
    if (done) sync->set(done, STRATA_UNAVAILABLE, text.c_str());
    return {};
  }
  Error fail(const Error& mine, const Error&) { return mine; }
  std::string who() const { return "rank 0"; }
};

static const void* STRATA_CALL get_interface(const char* id) {
  return std::string(id) == STRATA_COLLECTIVE ? &strata::collective_kit::Slots<strata_comm>::table : nullptr;
}

static const strata_plugin descriptor = {sizeof(strata_plugin), STRATA_ABI_MINOR, "late_failure", "0.1.0",
                                         get_interface};

extern "C" STRATA_EXPORT const strata_plugin* STRATA_CALL strata_plugin_entry_v1(uint32_t) { return &descriptor; }
