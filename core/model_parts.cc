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

// What the plugin takes for the latest, too: the announced one if it came to be, else the one before.
std::string latest_of(const std::string& root) {
  const std::string next = first_line(root + "/.latest.next");
  return !next.empty() && exists(root + "/" + next) ? next : first_line(root + "/latest");
}

// The tensor and pipeline sizes of a saved checkpoint.
void sizes_in(const std::string& directory, int* tensors, int* stages) {
  *tensors = *stages = 1;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(directory, ignored)) {
    int tensor, tensor_size, stage, stage_count;
    const std::string name = entry.path().filename();
    if (std::sscanf(name.c_str(), "tp%dof%d-pp%dof%d", &tensor, &tensor_size, &stage, &stage_count) != 4) continue;
    *tensors = tensor_size;
    *stages = stage_count;
  }
}

}  // namespace

Status ModelParts::make_room() const {
  if (tag_.empty() || tag_[0] == '.' || tag_ == "latest" || tag_.find('/') != std::string::npos) {
    return {STRATA_INVALID_ARGUMENT, "\"" + tag_ + "\" cannot be the name of a directory of checkpoints"};
  }
  if (exists(root_ + "/" + tag_)) return {STRATA_ALREADY_EXISTS, root_ + "/" + tag_ + " is there already"};
  STRATA_RETURN_IF_ERROR(make_directory(root_));
  abandon();
  return make_directory(partial_);
}

void ModelParts::abandon() const {
  std::error_code ignored;  // what is left over is found again by the next save
  fs::remove_all(partial_, ignored);
}

// The name is announced first: after a kill between the renames, a load finds the newer checkpoint.
Status ModelParts::publish() const {
  const std::string next = root_ + "/.latest.next";
  std::ofstream(next, std::ios::trunc) << tag_ << "\n";
  for (const std::string& path : {next, partial_, root_}) STRATA_RETURN_IF_ERROR(sync_path(path));
  for (const auto& [from, to] : {std::pair{partial_, root_ + "/" + tag_}, {next, root_ + "/latest"}}) {
    const int why = ::rename(from.c_str(), to.c_str()) != 0 ? errno : 0;
    STRATA_RETURN_IF_ERROR(result(why, "rename of " + from + " to " + to));
    STRATA_RETURN_IF_ERROR(sync_path(root_));
  }
  return Ok();
}

Status ModelParts::find(const Places& places, const std::string& root, const char* tag, std::string* part_root,
                        std::string* found) {
  *found = tag ? tag : latest_of(root);
  *part_root = root;
  const bool parts = places.parts() > 1;
  const std::string directory = root + "/" + *found;
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
