// fault_offload.cc - the wrapper of strata.offload/1. It alone can be short, and can hide that a tier is addressable.
#include "interfaces.h"
#include "strata/iface/offload.h"

using strata::fault::close_wrapper;
using strata::fault::open_wrapper;

struct strata_offload : strata::fault::Wrapper<strata_offload_api, strata_offload> {};

namespace strata::fault {

const Interface kOffload = {STRATA_OFFLOAD,
                            "offload",
                            {{"open", true, false},
                             {"close", false, false},
                             {"caps", true, false},
                             {"alloc", true, false},
                             {"free", false, false},
                             {"map", true, false},
                             {"read", true, true},
                             {"write", true, true},
                             {"register_memory", true, false},
                             {"unregister_memory", false, false}}};

namespace {

strata_status STRATA_CALL offload_open(const strata_open_args* args, strata_offload** out) {
  return open_wrapper(kOffload, args, out);
}
void STRATA_CALL offload_close(strata_offload* self) { close_wrapper(self); }

strata_status STRATA_CALL offload_caps(strata_offload* self, strata_offload_caps* out) {
  return self->shim.call("caps", 0, [&] {
    const strata_status code = self->api->caps(self->inner, out);
    if (self->shim.hide_map()) out->flags &= ~STRATA_OFFLOAD_ADDRESSABLE;
    return code;
  });
}

strata_status STRATA_CALL offload_alloc(strata_offload* self, uint64_t bytes, const char* label, strata_region* out) {
  return self->shim.call("alloc", bytes, [&] { return self->api->alloc(self->inner, bytes, label, out); });
}

// Rules and counts know it as "alloc", which it is whatever the wrapped tier makes of the flags.
strata_status STRATA_CALL offload_alloc_for(strata_offload* self, uint64_t bytes, uint32_t flags, const char* label,
                                            strata_region* out) {
  return self->shim.call("alloc", bytes, [&] {
    const strata_status code = self->api->alloc_for(self->inner, bytes, flags, label, out);
    return code == STRATA_UNIMPLEMENTED ? self->api->alloc(self->inner, bytes, label, out) : code;
  });
}

void STRATA_CALL offload_free(strata_offload* self, strata_region region) {
  self->shim.call_void("free", [&] { self->api->free(self->inner, region); });
}

strata_status STRATA_CALL offload_map(strata_offload* self, strata_region region, void** out) {
  return self->shim.call("map", 0, [&] {
    if (self->shim.hide_map()) return self->shim.fail({STRATA_UNIMPLEMENTED, "fault: map is hidden (hide_map)"});
    return self->api->map(self->inner, region, out);
  });
}

using Transfer = strata_status(STRATA_CALL*)(strata_offload*, const strata_io_args*, strata_event*);

// Half of the bytes, in whole units of the tier's alignment.
strata_status pass_half(strata_offload* self, Transfer slot, strata_io_args io) {
  strata_offload_caps caps{};
  caps.struct_size = sizeof(caps);
  if (strata_status code = self->api->caps(self->inner, &caps)) return code;
  io.bytes = io.bytes / 2 / caps.io_alignment * caps.io_alignment;
  return slot(self->inner, &io, nullptr);
}

strata_status transfer(strata_offload* self, const char* op, Transfer slot, const strata_io_args* args,
                       strata_event* done) {
  const strata_io_args io = *args;  // the struct is the caller's again when this returns; its buffer until done
  return self->shim.transfer(
      op, io.bytes, done, [=](strata_event* event) { return slot(self->inner, &io, event); },
      [=] { return pass_half(self, slot, io); });
}

strata_status STRATA_CALL offload_read(strata_offload* self, const strata_io_args* args, strata_event* done) {
  return transfer(self, "read", self->api->read, args, done);
}

strata_status STRATA_CALL offload_write(strata_offload* self, const strata_io_args* args, strata_event* done) {
  return transfer(self, "write", self->api->write, args, done);
}

strata_status STRATA_CALL offload_register_memory(strata_offload* self, void* address, uint64_t bytes) {
  return self->shim.call("register_memory", bytes,
                         [&] { return self->api->register_memory(self->inner, address, bytes); });
}

void STRATA_CALL offload_unregister_memory(strata_offload* self, void* address) {
  self->shim.call_void("unregister_memory", [&] { self->api->unregister_memory(self->inner, address); });
}

}  // namespace

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
    offload_register_memory,
    offload_unregister_memory,
    offload_alloc_for,
};

}  // namespace strata::fault
