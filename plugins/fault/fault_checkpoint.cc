// fault_checkpoint.cc - the wrapper of strata.checkpoint/1. An open checkpoint has no instance beside it in load_info,
// load_read and load_close, so the wrapper's load handle carries its own.
#include "interfaces.h"

struct strata_ckpt : strata::fault::Wrapper<strata_checkpoint_api, strata_ckpt> {};

struct strata_ckpt_load {
  strata_ckpt* owner;
  strata_ckpt_load* inner;
};

namespace strata::fault {

const Interface kCheckpoint = {STRATA_CHECKPOINT,
                               "checkpoint",
                               {{"open", true, false},
                                {"close", false, false},
                                {"write", true, false},
                                {"commit", true, false},
                                {"abandon", false, false},
                                {"load_open", true, false},
                                {"load_info", true, false},
                                {"load_read", true, false},
                                {"load_close", false, false},
                                {"export_weights", true, false},
                                {"may_replace", true, false}}};

namespace {

strata_status STRATA_CALL ckpt_open(const strata_open_args* args, strata_ckpt** out) {
  return open_wrapper(kCheckpoint, args, out);
}
void STRATA_CALL ckpt_close(strata_ckpt* self) { close_wrapper(self); }

strata_status STRATA_CALL ckpt_write(strata_ckpt* self, const strata_ckpt_save_args* args, strata_ckpt_save** out) {
  return self->shim.call("write", 0, [&] { return self->api->write(self->inner, args, out); });
}

// A commit frees its save in any case: one that a rule failed is abandoned.
strata_status STRATA_CALL ckpt_commit(strata_ckpt* self, strata_ckpt_save* save) {
  bool passed_on = false;
  const strata_status code = self->shim.call("commit", 0, [&] {
    passed_on = true;
    return self->api->commit(self->inner, save);
  });
  if (!passed_on) self->api->abandon(self->inner, save);
  return code;
}
void STRATA_CALL ckpt_abandon(strata_ckpt* self, strata_ckpt_save* save) {
  self->shim.call_void("abandon", [&] { self->api->abandon(self->inner, save); });
}

strata_status STRATA_CALL ckpt_load_open(strata_ckpt* self, const char* root, const char* tag, strata_ckpt_load** out) {
  return self->shim.call("load_open", 0, [&]() -> strata_status {
    auto load = std::make_unique<strata_ckpt_load>(strata_ckpt_load{self, nullptr});
    if (strata_status code = self->api->load_open(self->inner, root, tag, &load->inner)) return code;
    *out = load.release();
    return STRATA_OK;
  });
}
strata_status STRATA_CALL ckpt_load_info(strata_ckpt_load* load, strata_ckpt_info* out) {
  return load->owner->shim.call("load_info", 0, [&] { return load->owner->api->load_info(load->inner, out); });
}
strata_status STRATA_CALL ckpt_load_read(strata_ckpt_load* load, uint64_t param, const char* array, uint64_t offset,
                                         uint64_t count, void* dst) {
  return load->owner->shim.call(
      "load_read", 0, [&] { return load->owner->api->load_read(load->inner, param, array, offset, count, dst); });
}
void STRATA_CALL ckpt_load_close(strata_ckpt_load* load) {
  load->owner->shim.call_void("load_close", [&] { load->owner->api->load_close(load->inner); });
  delete load;
}

strata_status STRATA_CALL ckpt_export_weights(strata_ckpt* self, const strata_ckpt_save_args* args, uint32_t phase,
                                              strata_ckpt_save** inout) {
  return self->shim.call("export_weights", 0,
                         [&] { return self->api->export_weights(self->inner, args, phase, inout); });
}

strata_status STRATA_CALL ckpt_may_replace(strata_ckpt* self, const char* root, const char* tag) {
  return self->shim.call("may_replace", 0, [&] { return self->api->may_replace(self->inner, root, tag); });
}

}  // namespace

const strata_checkpoint_api checkpoint_table = {
    sizeof(strata_checkpoint_api),
    STRATA_ABI_MINOR,
    ckpt_open,
    ckpt_close,
    ckpt_write,
    ckpt_commit,
    ckpt_abandon,
    ckpt_load_open,
    ckpt_load_info,
    ckpt_load_read,
    ckpt_load_close,
    ckpt_export_weights,
    ckpt_may_replace,
};

}  // namespace strata::fault
