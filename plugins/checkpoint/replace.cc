#include "replace.h"

#include <fcntl.h>

#include <cstdio>

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

}  // namespace

std::string replaced_path(const std::string& root, const std::string& tag) { return root + "/." + tag + ".replaced"; }

std::string directory_of(const std::string& root, const std::string& tag) {
  const std::string committed = root + "/" + tag, replaced = replaced_path(root, tag);
  return !exists(committed) && exists(replaced) ? replaced : committed;
}

void put_right(const strata_ckpt_save& save) {
  const std::string committing = committing_path(save);
  {
    WriterLock no_other;
    no_other.take(committing + "/" + rank_file_name(0), false);
  }
  remove_tree(committing);
  if (exists(save.committed)) {
    remove_tree(save.replaced);
  } else if (exists(save.replaced)) {
    rename_new(save.replaced, save.committed);
  }
}

void require_replaceable(const strata_ckpt_save& save) {
  if (!exists(save.committed)) return;
  if (!is_directory(save.committed)) {
    raise(STRATA_ALREADY_EXISTS, save.committed, ": is there, is no checkpoint, and is not replaced");
  }
  for (const std::string& name : list_directory(save.committed)) {
    if (is_part(name)) continue;
    raise(STRATA_ALREADY_EXISTS, save.committed, ": has '", name,
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
  rename_over(save.committed, save.replaced);
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

ReadDirectory::ReadDirectory(std::string path)
    : path_(std::move(path)), fd_(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {}

void ReadDirectory::check() const {
  if (!fd_ || same_file(fd_.get(), path_)) return;  // without one, whoever opens its files says why
  raise(STRATA_UNAVAILABLE, path_, ": was replaced by another save while it was being read; load it again");
}

}  // namespace strata::checkpoint
