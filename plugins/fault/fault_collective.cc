// fault_collective.cc - the wrapper of strata.collective/1. Collectives are passed on in order and at once; with an
// event it is their completion that is late or held. What is split off obeys, and is counted by, the rules of the
// whole: its calls go on where those of the instance it was split from stopped.
#include "interfaces.h"

struct strata_comm : strata::fault::Wrapper<strata_collective_api, strata_comm> {
  int32_t world = 1;             // of the wrapped instance, for output bytes
  strata_comm* whole = nullptr;  // of what is split off

  strata::fault::Shim& rules() { return whole ? whole->rules() : shim; }
};

namespace strata::fault {

const Interface kCollective = {STRATA_COLLECTIVE,
                               "collective",
                               {{"open", true, false},
                                {"close", false, false},
                                {"caps", true, false},
                                {"alloc", true, false},
                                {"free", false, false},
                                {"all_gather", true, false},
                                {"reduce_scatter", true, false},
                                {"all_reduce", true, false},
                                {"broadcast", true, false},
                                {"all_to_all", true, false},
                                {"barrier", true, false},
                                {"abort", false, false},
                                {"exchange", true, false},
                                {"split", true, false}}};

namespace {

void read_world(strata_comm* self) {
  strata_collective_caps caps{};
  caps.struct_size = sizeof(caps);
  if (self->api->caps(self->inner, &caps) == STRATA_OK) self->world = caps.world;
}

strata_status STRATA_CALL comm_open(const strata_open_args* args, strata_comm** out) {
  if (strata_status code = open_wrapper(kCollective, args, out)) return code;
  read_world(*out);
  return STRATA_OK;
}
void STRATA_CALL comm_close(strata_comm* self) {
  if (!self->whole) return close_wrapper(self);
  self->rules().call_void("close", [&] { self->api->close(self->inner); });
  delete self;
}

strata_status STRATA_CALL comm_caps(strata_comm* self, strata_collective_caps* out) {
  return self->rules().call("caps", 0, [&] { return self->api->caps(self->inner, out); });
}
strata_status STRATA_CALL comm_alloc(strata_comm* self, uint64_t bytes, void** out) {
  return self->rules().call("alloc", bytes, [&] { return self->api->alloc(self->inner, bytes, out); });
}
void STRATA_CALL comm_free(strata_comm* self, void* ptr) {
  self->rules().call_void("free", [&] { self->api->free(self->inner, ptr); });
}

using Slot = strata_status(STRATA_CALL*)(strata_comm*, const strata_coll_args*, strata_event*);

// `copies`: how many times `count` elements an item puts out on this rank.
strata_status collective(strata_comm* self, const char* op, Slot slot, const strata_coll_args* args, uint64_t copies,
                         strata_event* done) {
  uint64_t bytes = 0;
  for (uint64_t k = 0; k < args->item_count; ++k) {
    const char* at = reinterpret_cast<const char*>(args->items) + k * args->item_stride;
    const auto& item = *reinterpret_cast<const strata_coll_item*>(at);
    bytes += item.count * copies * plugin_kit::size_of(item.out_dtype);
  }
  return self->rules().complete(op, bytes, done, [=](strata_event* event) { return slot(self->inner, args, event); });
}

strata_status STRATA_CALL comm_all_gather(strata_comm* self, const strata_coll_args* args, strata_event* done) {
  return collective(self, "all_gather", self->api->all_gather, args, static_cast<uint64_t>(self->world), done);
}
strata_status STRATA_CALL comm_reduce_scatter(strata_comm* self, const strata_coll_args* args, strata_event* done) {
  return collective(self, "reduce_scatter", self->api->reduce_scatter, args, 1, done);
}
strata_status STRATA_CALL comm_all_reduce(strata_comm* self, const strata_coll_args* args, strata_event* done) {
  return collective(self, "all_reduce", self->api->all_reduce, args, 1, done);
}
strata_status STRATA_CALL comm_broadcast(strata_comm* self, const strata_coll_args* args, strata_event* done) {
  return collective(self, "broadcast", self->api->broadcast, args, 1, done);
}
strata_status STRATA_CALL comm_all_to_all(strata_comm* self, const strata_coll_args* args, strata_event* done) {
  return collective(self, "all_to_all", self->api->all_to_all, args, static_cast<uint64_t>(self->world), done);
}
strata_status STRATA_CALL comm_barrier(strata_comm* self, const strata_coll_args* args) {
  return self->rules().call("barrier", 0, [&] { return self->api->barrier(self->inner, args); });
}
void STRATA_CALL comm_abort(strata_comm* self, strata_status code, const char* text) {
  self->rules().call_void("abort", [&] { self->api->abort(self->inner, code, text); });
}

strata_status STRATA_CALL comm_exchange(strata_comm* self, const void* in, void* out, uint64_t bytes,
                                        const strata_coll_args* args) {
  return self->rules().call("exchange", bytes * static_cast<uint64_t>(self->world),
                            [&] { return self->api->exchange(self->inner, in, out, bytes, args); });
}

strata_status STRATA_CALL comm_split(strata_comm* self, int32_t colour, int32_t key, const strata_coll_args* args,
                                     strata_comm** out) {
  return self->rules().call("split", 0, [&]() -> strata_status {
    auto part = std::make_unique<strata_comm>();
    part->api = self->api;
    part->whole = self;
    if (strata_status code = self->api->split(self->inner, colour, key, args, &part->inner)) return code;
    read_world(part.get());
    *out = part.release();
    return STRATA_OK;
  });
}

}  // namespace

const strata_collective_api collective_table = {
    sizeof(strata_collective_api),
    STRATA_ABI_MINOR,
    comm_open,
    comm_close,
    comm_caps,
    comm_alloc,
    comm_free,
    comm_all_gather,
    comm_reduce_scatter,
    comm_all_reduce,
    comm_broadcast,
    comm_all_to_all,
    comm_barrier,
    comm_abort,
    comm_exchange,
    comm_split,
};

}  // namespace strata::fault
