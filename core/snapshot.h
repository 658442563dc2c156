// snapshot.h - checkpoints: what the engine hands to the checkpoint plugin, and what it takes back.
//
// Saving: every rank writes its slices, all agree that all did, rank 0 of each data-parallel group publishes its part
// of the model, and rank 0 of the world all parts (model_parts.h). Loading: every rank reads the element ranges it
// owns, whatever the saving run's world size and stage were. Between steps, with no update under way.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/backends.h"
#include "core/consensus.h"
#include "core/model_parts.h"
#include "core/tensors.h"

namespace strata {

// What travels beside the tensors.
struct RunState {
  uint64_t steps = 0, applied = 0, skipped = 0;
  uint64_t save_id = 0;                     // of the checkpoint that was loaded
  std::vector<uint64_t> unit_steps;         // by registered unit
  std::map<std::string, std::string> meta;  // the host's own
};

struct Loaded {
  RunState run;
  std::string path;
  int32_t world = 0;                // of the run that saved
  std::vector<std::string> unread;  // params of the checkpoint that are not registered here
};

class Snapshot {
 public:
  Snapshot(const Registry& registry, const Layout& layout, const Checkpoint& checkpoint, const Consensus& consensus,
           Weights& weights, States& states, Tensors& tensors);

  // `weights`: the checkpoint has the one weight file in it.
  Status save(const std::string& root, const std::string& tag, const RunState& run, bool weights);
  // A load that is refused leaves everything as it was; one that fails later sets *changed.
  Status load(const std::string& root, const char* tag, Loaded* out, bool* changed);
  Status export_weights(const std::string& path);

 private:
  struct Description;  // the arrays behind strata_ckpt_save_args
  Status begin_save(const std::string& what, uint64_t* save_id);
  Status write_weights(const strata_ckpt_save_args* args, const std::string& what, strata_ckpt_save** save);
  Status end_phase(const Status& mine, const std::string& what, strata_ckpt_save* save);
  Status publish(const std::string& what, strata_ckpt_save* save);
  Status make_room(ModelParts& parts, const std::string& what);
  Status publish_parts(const ModelParts& parts, const Status& committed, const std::string& what);
  Status match_params(const strata_ckpt_info& info, std::vector<uint64_t>* places,
                      std::vector<std::string>* unread) const;
  Status load_tensors(strata_ckpt_load* load, const std::vector<uint64_t>& places);
  Status load_param(strata_ckpt_load* load, uint64_t index, const Param& p);
  Status found_alike(const Status& mine, const std::string& what);
  Status load_run(const strata_ckpt_info& info, RunState* run) const;

  const Registry& registry_;
  const Layout& layout_;
  const Checkpoint& checkpoint_;
  const Consensus& consensus_;
  Weights& weights_;
  States& states_;
  Tensors& tensors_;
};

}  // namespace strata
