#include "core/model_parts.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace strata {

namespace {

namespace fs = std::filesystem;

Status result(int why, const std::string& what) {
  if (why == 0) return Ok();
  const strata_status code = why == ENOENT   ? STRATA_NOT_FOUND
                             : why == ENOSPC ? STRATA_RESOURCE_EXHAUSTED
                                             : STRATA_INTERNAL;
  return {code, what + ": " + std::strerror(why)};
}

Status sync_path(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const int why = file < 0 || ::fsync(file) != 0 ? errno : 0;
  if (file >= 0) ::close(file);
  return result(why, "sync of " + path);
}

Status make_directory(const std::string& path) {
  std::error_code error;
  fs::create_directory(path, error);
  return result(error.value(), "making " + path);
}

bool exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

std::string first_line(const std::string& path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

// Where a checkpoint lies: set aside, after a kill between the two renames of a save that replaced it.
std::string directory_of(const std::string& root, const std::string& tag) {
  const std::string committed = root + "/" + tag, replaced = root + "/." + tag + ".replaced";
  return !exists(committed) && exists(replaced) ? replaced : committed;
}

Status rename(const std::string& from, const std::string& to) {
  return result(::rename(from.c_str(), to.c_str()) != 0 ? errno : 0, "rename of " + from + " to " + to);
}

// What the plugin takes for the latest, too: the announced one if it came to be, else the one before.
std::string latest_of(const std::string& root) {
  const std::string next = first_line(root + "/.latest.next");
  return !next.empty() && exists(directory_of(root, next)) ? next : first_line(root + "/latest");
}

// The tensor and pipeline sizes of a saved checkpoint; false when there is anything but parts in it.
bool sizes_in(const std::string& directory, int* tensors, int* stages) {
  *tensors = *stages = 1;
  bool only_parts = true;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    int tensor, tensor_size, stage, stage_count, end = 0;
    const std::string name = entry.path().filename();
    std::sscanf(name.c_str(), "tp%dof%d-pp%dof%d%n", &tensor, &tensor_size, &stage, &stage_count, &end);
    if (end != static_cast<int>(name.size())) {
      only_parts = false;
      continue;
    }
    *tensors = tensor_size;
    *stages = stage_count;
  }
  return only_parts && !error;
}

}  // namespace

Status ModelParts::make_room() const {
  if (tag_.empty() || tag_[0] == '.' || tag_ == "latest" || tag_.find('/') != std::string::npos) {
    return {STRATA_INVALID_ARGUMENT, "\"" + tag_ + "\" cannot be the name of a directory of checkpoints"};
  }
  STRATA_RETURN_IF_ERROR(make_directory(root_));
  std::error_code ignored;
  int tensors, stages;
  if (!exists(committed_) && exists(replaced_)) STRATA_RETURN_IF_ERROR(rename(replaced_, committed_));
  fs::remove_all(replaced_, ignored);
  if (exists(committed_) && (fs::is_symlink(committed_) || !sizes_in(committed_, &tensors, &stages))) {
    return {STRATA_ALREADY_EXISTS, committed_ + " is there, is no checkpoint of a model in parts, and is not replaced"};
  }
  abandon();
  return make_directory(partial_);
}

void ModelParts::abandon() const {
  std::error_code ignored;  // what is left over is found again by the next save
  fs::remove_all(partial_, ignored);
}

Status ModelParts::announce() const {
  const std::string next = root_ + "/.latest.next";
  std::ofstream(next, std::ios::trunc) << tag_ << "\n";
  STRATA_RETURN_IF_ERROR(sync_path(next));
  return sync_path(root_);
}

// In one step where the file system can exchange two names.
Status ModelParts::take_name() const {
  if (!exists(committed_)) return rename(partial_, committed_);
  const bool exchanged = ::renameat2(AT_FDCWD, partial_.c_str(), AT_FDCWD, committed_.c_str(), RENAME_EXCHANGE) == 0;
  const int why = exchanged ? 0 : errno;
  if (why != EINVAL && why != ENOSYS && why != EOPNOTSUPP) return result(why, "exchange with " + committed_);
  STRATA_RETURN_IF_ERROR(rename(committed_, replaced_));
  Status taken = sync_path(root_);
  if (taken.ok()) taken = rename(partial_, committed_);
  if (!taken.ok()) ::rename(replaced_.c_str(), committed_.c_str());
  return taken;
}

// A new name is announced first: after a kill between the renames, a load finds the newer checkpoint. One that is there
// would count at once: it is announced when it has been replaced.
Status ModelParts::publish() const {
  const bool is_new = !exists(committed_);
  STRATA_RETURN_IF_ERROR(sync_path(partial_));
  if (is_new) STRATA_RETURN_IF_ERROR(announce());
  STRATA_RETURN_IF_ERROR(take_name());
  STRATA_RETURN_IF_ERROR(sync_path(root_));
  if (!is_new) STRATA_RETURN_IF_ERROR(announce());
  STRATA_RETURN_IF_ERROR(rename(root_ + "/.latest.next", root_ + "/latest"));
  std::error_code ignored;  // what is left over is found again by the next save
  for (const std::string& path : {partial_, replaced_}) fs::remove_all(path, ignored);
  return sync_path(root_);
}

Status ModelParts::find(const Places& places, const std::string& root, const char* tag, std::string* part_root,
                        std::string* found) {
  *found = tag ? tag : latest_of(root);
  *part_root = root;
  const bool parts = places.parts() > 1;
  const std::string directory = directory_of(root, *found);
  if (found->empty() || !exists(directory)) {
    if (!parts) return Ok();  // the plugin says what there is
    return {STRATA_NOT_FOUND, found->empty() ? root + "/latest names no checkpoint" : directory + " is not there"};
  }
  int tensors = 1, stages = 1;
  sizes_in(directory, &tensors, &stages);
  if (tensors != places.tensor.size || stages != places.pipeline.size) {
    const auto sizes = [](int t, int p) {
      return "tensor_model_parallel_size = " + std::to_string(t) +
             " and pipeline_model_parallel_size = " + std::to_string(p);
    };
    return {STRATA_INVALID_ARGUMENT,
            directory + " was saved with " + sizes(tensors, stages) + ", this run has " +
                sizes(places.tensor.size, places.pipeline.size) +
                ": the parts of a model cannot be cut anew (the data-parallel size may change)"};
  }
  if (parts) *part_root = directory + "/" + places.part_name();
  return !parts || exists(*part_root) ? Ok() : Status(STRATA_NOT_FOUND, *part_root + ": this part is missing");
}

std::string ModelParts::file_of_part(const Places& places, const std::string& file) {
  if (places.parts() == 1) return file;
  const fs::path path(file);
  return path.stem().string() + "." + places.part_name() + path.extension().string();
}

}  // namespace strata
