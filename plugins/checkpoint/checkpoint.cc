// checkpoint.cc - the table of strata.checkpoint/1: arguments in, one function of the plugin, statuses out.
//
// Nothing is decided here. Every slot runs inside the kit's `guard`, which turns an Error into host->fail and lets
// nothing else out. Threads: one caller at a time per instance; instances share nothing but the HDF5 lock (h5.h).
#include <memory>
#include <string>

#include "load.h"
#include "plugin_kit/plugin_kit.h"
#include "replace.h"
#include "save.h"
#include "strata/plugin.h"

namespace strata::checkpoint {
namespace {

using plugin_kit::guard;

strata_status STRATA_CALL open(const strata_open_args* args, strata_ckpt** out) {
  *out = nullptr;
  return guard(args->host, "checkpoint open", [&] {
    const plugin_kit::Options options(args->options);
    const int64_t threads = options.integer("io_threads", 2);
    if (threads < 1 || threads > 64) {
      raise(STRATA_INVALID_ARGUMENT, "io_threads = ", threads, " must be 1 to 64");
    }
    auto self = std::make_unique<strata_ckpt>();
    self->host = args->host;
    self->verify = options.flag("verify", true);
    self->direct_io = options.flag("direct_io", true);
    self->io_threads = static_cast<unsigned>(threads);
    *out = self.release();
  });
}

void STRATA_CALL close(strata_ckpt* self) { delete self; }

std::unique_ptr<strata_ckpt_save> begin(const strata_ckpt_save_args& args) {
  auto save = std::make_unique<strata_ckpt_save>();
  save->description = from_args(args);
  save->description.format = kRankFormat;
  save->root = with_slash_stripped(args.root);
  set_paths(*save);
  return save;
}

strata_status STRATA_CALL write(strata_ckpt* self, const strata_ckpt_save_args* args, strata_ckpt_save** out) {
  *out = nullptr;
  return guard(self->host, "checkpoint write", [&] {
    check_tag(args->tag);
    auto save = begin(*args);
    write_rank_file(*self, *args, *save);
    *out = save.release();
  });
}

strata_status STRATA_CALL commit(strata_ckpt* self, strata_ckpt_save* save) {
  return guard(self->host, "checkpoint commit", [&] {
    const std::unique_ptr<strata_ckpt_save> owned(save);
    if (!save || save->description.rank != 0) return;
    save->has_rank_files ? commit_checkpoint(*self, *save) : commit_export(*save);
  });
}

void STRATA_CALL abandon(strata_ckpt* self, strata_ckpt_save* save) {
  guard(self->host, "checkpoint abandon", [&] {
    const std::unique_ptr<strata_ckpt_save> owned(save);
    if (save) remove_own(*save);
  });
}

strata_status STRATA_CALL load_open(strata_ckpt* self, const char* root, const char* tag, strata_ckpt_load** out) {
  *out = nullptr;
  return guard(self->host, "checkpoint load", [&] {
    if (!root || !*root) raise(STRATA_INVALID_ARGUMENT, "root is missing");
    *out = open_checkpoint(*self, with_slash_stripped(root), tag).release();
  });
}

strata_status STRATA_CALL load_info(strata_ckpt_load* load, strata_ckpt_info* out) {
  return guard(load->host, "checkpoint info", [&] {
    if (!STRATA_HAS(out, strata_ckpt_info, meta_stride)) {
      raise(STRATA_INVALID_ARGUMENT, "out.struct_size is ", out->struct_size, ", too short for this ABI");
    }
    out->tag = load->tag.c_str();
    out->world = load->description.world;
    out->params = load->params.data();
    out->param_count = load->params.size();
    out->param_stride = sizeof(strata_ckpt_param);
    out->meta = load->meta.data();
    out->meta_count = load->meta.size();
    out->meta_stride = sizeof(strata_option);
  });
}

strata_status STRATA_CALL load_read(strata_ckpt_load* load, uint64_t param, const char* array, uint64_t offset,
                                    uint64_t count, void* dst) {
  return guard(load->host, "checkpoint read", [&] {
    if (!array || (!dst && count)) raise(STRATA_INVALID_ARGUMENT, "array or dst is NULL");
    read_param(*load, param, array, {offset, count}, static_cast<char*>(dst));
  });
}

void STRATA_CALL load_close(strata_ckpt_load* load) { delete load; }

strata_status STRATA_CALL export_weights(strata_ckpt* self, const strata_ckpt_save_args* args, uint32_t phase,
                                         strata_ckpt_save** inout) {
  return guard(self->host, "checkpoint export", [&] {
    std::unique_ptr<strata_ckpt_save> save(*inout);
    *inout = nullptr;
    if (!save) save = begin(*args);
    save->has_weights = true;
    try {
      if (phase > 1) raise(STRATA_INVALID_ARGUMENT, "phase ", phase, " must be 0 or 1");
      if (phase == 0 && save->description.rank == 0) export_layout(*self, *save);
      if (phase == 1) export_data(*self, *args, *save);
    } catch (...) {
      remove_own(*save);
      throw;
    }
    *inout = save.release();
  });
}

strata_status STRATA_CALL may_replace(strata_ckpt* self, const char* root, const char* tag) {
  return guard(self->host, "checkpoint", [&] {
    check_tag(tag);
    require_replaceable(with_slash_stripped(root) + "/" + tag);
  });
}

const strata_checkpoint_api kApi = {sizeof(strata_checkpoint_api),
                                    STRATA_ABI_MINOR,
                                    open,
                                    close,
                                    write,
                                    commit,
                                    abandon,
                                    load_open,
                                    load_info,
                                    load_read,
                                    load_close,
                                    export_weights,
                                    may_replace};

const void* STRATA_CALL get_interface(const char* id) { return std::string(id) == STRATA_CHECKPOINT ? &kApi : nullptr; }

const strata_plugin kPlugin = {sizeof(strata_plugin), STRATA_ABI_MINOR, "checkpoint", "0.1.0", get_interface};

}  // namespace
}  // namespace strata::checkpoint

extern "C" STRATA_EXPORT const strata_plugin* STRATA_CALL strata_plugin_entry_v1(uint32_t) {
  return &strata::checkpoint::kPlugin;
}
