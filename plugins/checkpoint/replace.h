// replace.h - the name of a checkpoint, <root>/<tag>: how a finished save takes it, and where a reader looks.
//
// Rank 0 first moves the partial directory out of the other ranks' reach: one that lost touch may still take its file
// away. A new tag is then one rename. One that is there is replaced by exchanging the names of two directories, in one
// step: at any moment the name is a whole checkpoint, the old one or the new one. Where a file system cannot exchange
// names, the old one is renamed to <root>/.<tag>.replaced first; between the two renames readers find it there. It is
// removed once the new one is on the disk. What a kill leaves of all this, the next save of the tag puts right.
#pragma once

#include <string>

#include "io/fd.h"
#include "save.h"

namespace strata::checkpoint {

// From the root and the tag.
void set_paths(strata_ckpt_save& save);
std::string replaced_path(const std::string& root, const std::string& tag);
// Where a reader finds a checkpoint; <root>/<tag> when it is nowhere.
std::string directory_of(const std::string& root, const std::string& tag);

// For rank 0, as all of the following, under the tag's lock. What a killed save left is removed, gets its name back or
// becomes the latest; what cannot be removed is moved to <root>/.<tag>.left.<k>. Raises as require_replaceable does.
void put_right(const strata_ckpt_save& save);
// The same for other tags, where whoever saved to them died: its lock is there, and nobody's. A run that goes on from
// its newest checkpoint does not save that one again. What cannot be put right is left; `.partial` may be another
// rank's.
void put_others_right(const strata_ckpt_save& save);
// ALREADY_EXISTS when the name is taken by anything that is no checkpoint.
void require_replaceable(const std::string& committed);
// From here on the save's partial directory is another one, rank 0's own.
void take_partial(strata_ckpt_save& save);
// It becomes the checkpoint. False when that took two renames.
bool take_name(const strata_ckpt_save& save);
// What had the name before goes.
void remove_replaced(const strata_ckpt_save& save);

// A directory that is being read. A save may replace it meanwhile: then what was opened by name is of another save.
class ReadDirectory {
 public:
  // NOT_FOUND: there is no such checkpoint.
  ReadDirectory(const std::string& root, const std::string& tag);
  const std::string& path() const { return path_; }
  // Raises UNAVAILABLE unless all that was opened in it by name so far was in the one directory.
  void check() const;

 private:
  bool open();
  const std::string root_, tag_;
  std::string path_;
  io::Fd fd_;  // keeps its inode from being used again
};

}  // namespace strata::checkpoint
