// model_parts.h - where a checkpoint lies when a model has several parts, and how they become one checkpoint.
//
//   <root>/<tag>/tp0of2-pp1of2/<tag>   the checkpoint of a part, written by its data-parallel group
//   <root>/latest                      as the checkpoint plugin has it where the model is one part
//
// Parts are written and committed below <root>/.<tag>.partial, which rank 0 of the world renames when all are: a tag is
// there with all its parts or not at all. What had the name before ends as <root>/.<tag>.replaced, and goes: see
// plugins/checkpoint/replace.h, which does the same. A model that is one part lies at <root>/<tag> itself, and nothing
// is done here.
#pragma once

#include <string>

#include "core/backends.h"
#include "core/places.h"

namespace strata {

class ModelParts {
 public:
  ModelParts(const Places& places, const Checkpoint& checkpoint, std::string root, std::string tag)
      : places_(places),
        checkpoint_(checkpoint),
        root_(std::move(root)),
        tag_(std::move(tag)),
        committed_(root_ + "/" + tag_),
        partial_(root_ + "/." + tag_ + ".partial"),
        replaced_(root_ + "/." + tag_ + ".replaced") {}
  ~ModelParts();
  ModelParts(const ModelParts&) = delete;

  // Where the plugin writes this rank's part.
  std::string save_root() const { return places_.parts() == 1 ? root_ : partial_ + "/" + places_.part_name(); }
  // The three of rank 0. ALREADY_EXISTS: something else than a checkpoint has the name. FAILED_PRECONDITION: another
  // job saves to it; from here until this object ends it has <root>/.<tag>.lock locked. What saves that were killed
  // left goes away, of any tag, and what they committed and announced becomes the latest.
  Status make_room();
  Status publish() const;  // what it could not is abandoned
  void abandon() const;

  // Where this rank's part of a checkpoint is to be read. `tag` NULL: the latest, which is given in *found. It is
  // `root` itself for a model that is one part, and where there is no such checkpoint: the plugin then says what there
  // is.
  static Status find(const Places& places, const std::string& root, const char* tag, std::string* part_root,
                     std::string* found);
  // The name of one file per part: "model.tp0of2-pp1of2.h5".
  static std::string file_of_part(const Places& places, const std::string& file);

 private:
  enum class Lock { kTake, kOfTheDead };
  std::string announcement() const { return root_ + "/." + tag_ + ".latest"; }
  std::string lock_path() const { return root_ + "/." + tag_ + ".lock"; }
  Status take_lock(Lock which);
  Status put_right() const;
  void put_others_right() const;
  Status require_replaceable() const;
  Status take_name() const;
  Status make_latest() const;

  const Places& places_;
  const Checkpoint& checkpoint_;
  const std::string root_, tag_, committed_, partial_, replaced_;
  int lock_ = -1;  // of rank 0
};

}  // namespace strata
