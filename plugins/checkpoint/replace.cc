#include "replace.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "latest.h"

namespace strata::checkpoint {
namespace {

// A file that a commit publishes.
bool is_part(const std::string& name) {
  int rank = 0;
  return name == "index.h5" || name == kWeightsFile ||
         (std::sscanf(name.c_str(), "rank%5d.h5", &rank) == 1 && name == rank_file_name(rank));
}

std::string committing_path(const strata_ckpt_save& save) {
  return save.root + "/." + save.description.tag + ".committing";
}

// A leftover goes, or leaves its name: what is in the way would fail the save when all of it has been written.
void clear(const strata_ckpt_save& save, const std::string& path) {
  remove_tree(path);
  for (int k = 1; exists(path); ++k) {
    const std::string left = save.root + "/." + save.description.tag + ".left." + std::to_string(k);
    if (!exists(left)) rename_new(path, left);
  }
}

// Moves the name of a committed checkpoint that a kill left announced: this save will announce its own.
void finish_announced(const std::string& root) {
  try {
    if (announced_in(root).empty()) return;
  } catch (const Error& e) {
    if (e.code() == STRATA_DATA_LOSS) return;  // names nothing, and is written over
    throw;
  }
  name_latest(root);
}

}  // namespace

std::string replaced_path(const std::string& root, const std::string& tag) { return root + "/." + tag + ".replaced"; }

void set_paths(strata_ckpt_save& save) {
  const std::string& tag = save.description.tag;
  save.partial = save.root + "/." + tag + ".partial";
  save.committed = save.root + "/" + tag;
  save.replaced = replaced_path(save.root, tag);
}

std::string directory_of(const std::string& root, const std::string& tag) {
  const std::string committed = root + "/" + tag, replaced = replaced_path(root, tag);
  return !exists(committed) && is_directory(replaced) ? replaced : committed;
}

void put_right(const strata_ckpt_save& save) {
  finish_announced(save.root);
  if (is_directory(save.replaced)) {
    ::rmdir(save.committed.c_str());  // does nothing unless it is empty
    if (!exists(save.committed)) rename_new(save.replaced, save.committed);
  }
  require_replaceable(save.committed);
  ::unlink(save.partial.c_str());  // goes if it is a file: other ranks may be at work in it, or make it at this moment
  clear(save, committing_path(save));
  remove_quietly(announcement_path(save.root, save.description.tag));
  if (!is_directory(save.replaced) || exists(save.committed + "/index.h5")) clear(save, save.replaced);
}

void put_others_right(const strata_ckpt_save& save) {
  const std::string end = ".lock";
  for (const std::string& name : list_directory(save.root)) {
    const size_t length = name.size() - std::min(name.size(), end.size());
    if (length < 2 || name[0] != '.' || name.compare(length, end.size(), end) != 0) continue;
    strata_ckpt_save other;
    other.root = save.root;
    other.description.tag = name.substr(1, length - 1);
    if (other.description.tag == save.description.tag) continue;
    set_paths(other);
    try {
      if (other.tag_lock.take_of_the_dead(other.root, other.description.tag)) put_right(other);
    } catch (const Error&) {  // stays as it is
    }
  }
}

void require_replaceable(const std::string& committed) {
  if (!exists(committed)) return;
  if (!is_directory(committed)) {
    raise(STRATA_ALREADY_EXISTS, committed, ": is there, is no checkpoint, and is not replaced");
  }
  for (const std::string& name : list_directory(committed)) {
    if (is_part(name) && !is_directory(committed + "/" + name)) continue;
    raise(STRATA_ALREADY_EXISTS, committed, ": has '", name,
          "' in it, which is no part of a checkpoint, and is not replaced");
  }
}

void take_partial(strata_ckpt_save& save) {
  const std::string committing = committing_path(save);
  rename_over(save.partial, committing);
  save.partial = committing;
}

bool take_name(const strata_ckpt_save& save) {
  if (!exists(save.committed)) {
    rename_new(save.partial, save.committed);
    return true;
  }
  if (exchange(save.partial, save.committed)) return true;
  if (exists(save.replaced)) {  // put_right left the one there for a damaged one that has its name
    remove_tree(save.committed);
  } else {
    rename_over(save.committed, save.replaced);
  }
  try {
    sync_path(save.root);
    rename_new(save.partial, save.committed);
  } catch (const Error&) {
    std::rename(save.replaced.c_str(), save.committed.c_str());
    throw;
  }
  return false;
}

void remove_replaced(const strata_ckpt_save& save) {
  remove_tree(save.partial);  // they were exchanged
  remove_tree(save.replaced);
}

ReadDirectory::ReadDirectory(const std::string& root, const std::string& tag) : root_(root), tag_(tag) {
  // Its names may change hands between two looks, but hardly time and again.
  constexpr int kLooks = 10;
  for (int look = 0; look < kLooks; ++look) {
    if (open()) return;
  }
  if (!exists(path_)) raise(STRATA_NOT_FOUND, path_, ": there is no such checkpoint");
  raise(STRATA_UNAVAILABLE, path_, ": is there, but could not be opened; is it being replaced? load it again");
}

// O_PATH: it need not be readable, what is in it has to be.
bool ReadDirectory::open() {
  path_ = directory_of(root_, tag_);
  fd_ = io::Fd(::open(path_.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!fd_ && errno == ENOTDIR) raise(STRATA_DATA_LOSS, path_, ": is no directory");
  if (!fd_ && errno != ENOENT) raise_errno(errno, "open", path_);
  return static_cast<bool>(fd_);
}

void ReadDirectory::check() const {
  if (same_file(fd_.get(), path_) && directory_of(root_, tag_) == path_) return;
  raise(STRATA_UNAVAILABLE, path_, ": was replaced by another save while it was being read; load it again");
}

}  // namespace strata::checkpoint
