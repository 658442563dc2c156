// fault_device.cc - the wrapper of strata.device/1. Every slot is there: the host completed the wrapped table with its
// defaults, so optional ones are passed on like the rest.
#include "interfaces.h"

struct strata_device : strata::fault::Wrapper<strata_device_api, strata_device> {};

namespace strata::fault {

const Interface kDevice = {STRATA_DEVICE,
                           "device",
                           {{"open", true, false},
                            {"close", false, false},
                            {"caps", true, false},
                            {"alloc", true, false},
                            {"free", false, false},
                            {"alloc_pinned", true, false},
                            {"free_pinned", false, false},
                            {"copy", true, false},
                            {"fill", true, false},
                            {"cast", true, false},
                            {"accumulate", true, false},
                            {"square_sums", true, false},
                            {"find_nonfinite", true, false},
                            {"stream_create", true, false},
                            {"stream_destroy", false, false},
                            {"stream_wait_host", true, false},
                            {"stream_record", true, false},
                            {"marker_create", true, false},
                            {"marker_destroy", false, false},
                            {"marker_record", true, false},
                            {"stream_wait_marker", true, false},
                            {"marker_wait_host", true, false},
                            {"marker_create_timed", true, false},
                            {"marker_elapsed", true, false},
                            {"fold", true, false}}};

namespace {

strata_status STRATA_CALL device_open(const strata_open_args* args, strata_device** out) {
  return open_wrapper(kDevice, args, out);
}
void STRATA_CALL device_close(strata_device* self) { close_wrapper(self); }

strata_status STRATA_CALL device_caps(strata_device* self, strata_device_caps* out) {
  return self->shim.call("caps", 0, [&] { return self->api->caps(self->inner, out); });
}
strata_status STRATA_CALL device_alloc(strata_device* self, uint64_t bytes, void** out) {
  return self->shim.call("alloc", bytes, [&] { return self->api->alloc(self->inner, bytes, out); });
}
void STRATA_CALL device_free(strata_device* self, void* ptr) {
  self->shim.call_void("free", [&] { self->api->free(self->inner, ptr); });
}
strata_status STRATA_CALL device_alloc_pinned(strata_device* self, uint64_t bytes, void** out) {
  return self->shim.call("alloc_pinned", bytes, [&] { return self->api->alloc_pinned(self->inner, bytes, out); });
}
void STRATA_CALL device_free_pinned(strata_device* self, void* ptr) {
  self->shim.call_void("free_pinned", [&] { self->api->free_pinned(self->inner, ptr); });
}
strata_status STRATA_CALL device_copy(strata_device* self, void* dst, const void* src, uint64_t bytes,
                                      const strata_stream* stream) {
  return self->shim.call("copy", bytes, [&] { return self->api->copy(self->inner, dst, src, bytes, stream); });
}
strata_status STRATA_CALL device_fill(strata_device* self, void* dst, uint8_t value, uint64_t bytes,
                                      const strata_stream* stream) {
  return self->shim.call("fill", bytes, [&] { return self->api->fill(self->inner, dst, value, bytes, stream); });
}
strata_status STRATA_CALL device_cast(strata_device* self, void* dst, strata_dtype dst_dtype, const void* src,
                                      strata_dtype src_dtype, uint64_t count, strata_rounding rounding,
                                      const strata_stream* stream) {
  return self->shim.call("cast", count * plugin_kit::size_of(dst_dtype), [&] {
    return self->api->cast(self->inner, dst, dst_dtype, src, src_dtype, count, rounding, stream);
  });
}
strata_status STRATA_CALL device_accumulate(strata_device* self, float* dst, const void* src, strata_dtype src_dtype,
                                            uint64_t count, const strata_stream* stream) {
  return self->shim.call("accumulate", count * plugin_kit::size_of(src_dtype),
                         [&] { return self->api->accumulate(self->inner, dst, src, src_dtype, count, stream); });
}
strata_status STRATA_CALL device_square_sums(strata_device* self, const void* src, strata_dtype dtype, uint64_t count,
                                             double* sums, const strata_stream* stream) {
  return self->shim.call("square_sums", count * plugin_kit::size_of(dtype),
                         [&] { return self->api->square_sums(self->inner, src, dtype, count, sums, stream); });
}
strata_status STRATA_CALL device_find_nonfinite(strata_device* self, const void* src, strata_dtype dtype,
                                                uint64_t count, int64_t* index, const strata_stream* stream) {
  return self->shim.call("find_nonfinite", count * plugin_kit::size_of(dtype),
                         [&] { return self->api->find_nonfinite(self->inner, src, dtype, count, index, stream); });
}
strata_status STRATA_CALL device_stream_create(strata_device* self, int32_t priority, strata_stream* out) {
  return self->shim.call("stream_create", 0, [&] { return self->api->stream_create(self->inner, priority, out); });
}
void STRATA_CALL device_stream_destroy(strata_device* self, strata_stream* stream) {
  self->shim.call_void("stream_destroy", [&] { self->api->stream_destroy(self->inner, stream); });
}
strata_status STRATA_CALL device_stream_wait_host(strata_device* self, const strata_stream* stream) {
  return self->shim.call("stream_wait_host", 0, [&] { return self->api->stream_wait_host(self->inner, stream); });
}
strata_status STRATA_CALL device_stream_record(strata_device* self, const strata_stream* stream, strata_event* event) {
  return self->shim.call("stream_record", 0, [&] { return self->api->stream_record(self->inner, stream, event); });
}
strata_status STRATA_CALL device_marker_create(strata_device* self, strata_marker** out) {
  return self->shim.call("marker_create", 0, [&] { return self->api->marker_create(self->inner, out); });
}
void STRATA_CALL device_marker_destroy(strata_device* self, strata_marker* marker) {
  self->shim.call_void("marker_destroy", [&] { self->api->marker_destroy(self->inner, marker); });
}
strata_status STRATA_CALL device_marker_record(strata_device* self, strata_marker* marker,
                                               const strata_stream* stream) {
  return self->shim.call("marker_record", 0, [&] { return self->api->marker_record(self->inner, marker, stream); });
}
strata_status STRATA_CALL device_stream_wait_marker(strata_device* self, const strata_stream* stream,
                                                    strata_marker* marker) {
  return self->shim.call("stream_wait_marker", 0,
                         [&] { return self->api->stream_wait_marker(self->inner, stream, marker); });
}
strata_status STRATA_CALL device_marker_wait_host(strata_device* self, strata_marker* marker) {
  return self->shim.call("marker_wait_host", 0, [&] { return self->api->marker_wait_host(self->inner, marker); });
}
strata_status STRATA_CALL device_fold(strata_device* self, const strata_fold_item* items, uint64_t count,
                                      uint32_t stride, const strata_stream* stream) {
  return self->shim.call("fold", 0, [&] { return self->api->fold(self->inner, items, count, stride, stream); });
}
strata_status STRATA_CALL device_marker_create_timed(strata_device* self, strata_marker** out) {
  return self->shim.call("marker_create_timed", 0, [&] { return self->api->marker_create_timed(self->inner, out); });
}
strata_status STRATA_CALL device_marker_elapsed(strata_device* self, strata_marker* from, strata_marker* to,
                                                int64_t* ns) {
  return self->shim.call("marker_elapsed", 0, [&] { return self->api->marker_elapsed(self->inner, from, to, ns); });
}

}  // namespace

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

}  // namespace strata::fault
