#include "core/model_parts.h"

#include <fcntl.h>
#include <sys/stat.h>
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
  const strata_status code = why == ENOENT                    ? STRATA_NOT_FOUND
                             : why == EACCES || why == EROFS  ? STRATA_PERMISSION_DENIED
                             : why == ENOSPC || why == EDQUOT ? STRATA_RESOURCE_EXHAUSTED
                             : why == ENAMETOOLONG            ? STRATA_INVALID_ARGUMENT
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

// Of the name itself: a link is there whatever it leads to, and is no directory.
bool exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(fs::symlink_status(path, ignored));
}

bool is_directory(const std::string& path) {
  std::error_code ignored;
  return fs::is_directory(fs::symlink_status(path, ignored));
}

// On the disk when it returns, or not there.
Status write_file(const std::string& path, const std::string& text) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file < 0) return result(errno, "making " + path);
  const ssize_t written = ::write(file, text.data(), text.size());
  int why = written == static_cast<ssize_t>(text.size()) ? 0 : written < 0 ? errno : ENOSPC;
  if (why == 0 && ::fsync(file) != 0) why = errno;
  if (::close(file) != 0 && why == 0) why = errno;
  if (why != 0) ::unlink(path.c_str());
  return result(why, "writing " + path);
}

bool is_at(int file, const std::string& path) {
  struct stat a {
  }, b{};
  return ::fstat(file, &a) == 0 && ::stat(path.c_str(), &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
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
  return !exists(committed) && is_directory(replaced) ? replaced : committed;
}

Status rename(const std::string& from, const std::string& to) {
  return result(::rename(from.c_str(), to.c_str()) != 0 ? errno : 0, "rename of " + from + " to " + to);
}

// The tag in .latest.next if that checkpoint came to be, else "".
std::string announced_in(const std::string& root) {
  const std::string next = first_line(root + "/.latest.next");
  return !next.empty() && exists(directory_of(root, next)) ? next : "";
}

// What the plugin takes for the latest, too: the announced one if it came to be, else the one before.
std::string latest_of(const std::string& root) {
  const std::string next = announced_in(root);
  return !next.empty() ? next : first_line(root + "/latest");
}

// Moves what is announced to `latest`; another save may just have done so.
Status name_latest(const std::string& root) {
  const Status moved = rename(root + "/.latest.next", root + "/latest");
  if (!moved.ok() && moved.code() != STRATA_NOT_FOUND) return moved;
  return sync_path(root);
}

bool read_part_name(const std::string& name, int* tensors, int* stages) {
  int tensor, stage;
  if (name.size() > 60 || std::sscanf(name.c_str(), "tp%9dof%9d-pp%9dof%9d", &tensor, tensors, &stage, stages) != 4) {
    return false;
  }
  return name == "tp" + std::to_string(tensor) + "of" + std::to_string(*tensors) + "-pp" + std::to_string(stage) +
                     "of" + std::to_string(*stages);
}

// The tensor and pipeline sizes of a saved checkpoint.
void sizes_in(const std::string& directory, int* tensors, int* stages) {
  *tensors = *stages = 1;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(directory, ignored)) {
    int tensor_size, stage_count;
    if (!read_part_name(entry.path().filename(), &tensor_size, &stage_count)) continue;
    *tensors = tensor_size;
    *stages = stage_count;
  }
}

Status list(const std::string& directory, std::vector<fs::path>* all) {
  std::error_code error;
  for (auto it = fs::directory_iterator(directory, error); it != fs::end(it); it.increment(error)) {
    all->push_back(it->path());
  }
  return result(error.value(), "reading directory " + directory);
}

// What is neither a part of a model nor, in a part, what a save of it leaves there; "" when there is nothing else. Of
// the checkpoints themselves the plugin knows.
Status find_stranger(const std::string& directory, const std::string& tag, std::vector<fs::path>* parts,
                     std::string* stranger) {
  if (!is_directory(directory)) *stranger = directory;
  if (!stranger->empty()) return Ok();
  int tensors, stages;
  STRATA_RETURN_IF_ERROR(list(directory, parts));
  for (const fs::path& part : *parts) {
    if (!is_directory(part) || !read_part_name(part.filename(), &tensors, &stages)) *stranger = part;
    if (!stranger->empty()) return Ok();
    std::vector<fs::path> entries;
    STRATA_RETURN_IF_ERROR(list(part, &entries));
    for (const fs::path& entry : entries) {
      const std::string name = entry.filename();
      const bool names_latest = (name == "latest" || name == ".latest.next") && !is_directory(entry);
      if (name != tag && !names_latest) *stranger = entry;
    }
  }
  return Ok();
}

// A leftover goes, or leaves its name, as in plugins/checkpoint/replace.cc.
Status clear(const std::string& path, const std::string& aside) {
  std::error_code error;
  fs::remove_all(path, error);
  for (int k = 1; exists(path); ++k) {
    const std::string left = aside + std::to_string(k);
    if (!exists(left)) STRATA_RETURN_IF_ERROR(rename(path, left));
  }
  return Ok();
}

}  // namespace

ModelParts::~ModelParts() {
  if (lock_ < 0) return;
  ::unlink(lock_path().c_str());
  ::close(lock_);
}

// An open file description lock; where the file system has none, two saves of one tag are not noticed. Of the dead: one
// that is there, and that the file system says is nobody's.
Status ModelParts::take_lock(Lock which) {
  const std::string path = lock_path();
  while (true) {
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC | (which == Lock::kTake ? O_CREAT : 0), 0666);
    if (file < 0) return result(errno, "making " + path);
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    const bool locked = ::fcntl(file, F_OFD_SETLK, &lock) == 0;
    if (!locked && (which == Lock::kOfTheDead || errno == EAGAIN || errno == EACCES)) {
      ::close(file);
      return {STRATA_FAILED_PRECONDITION, committed_ + " is being saved by another job: " + path + " is locked"};
    }
    if (is_at(file, path)) {
      lock_ = file;
      return Ok();
    }
    ::close(file);  // whoever had it before removed it meanwhile
  }
}

Status ModelParts::make_room() {
  if (tag_.empty() || tag_[0] == '.' || tag_ == "latest" || tag_.find('/') != std::string::npos) {
    return {STRATA_INVALID_ARGUMENT, "\"" + tag_ + "\" cannot be the name of a directory of checkpoints"};
  }
  STRATA_RETURN_IF_ERROR(make_directory(root_));
  STRATA_RETURN_IF_ERROR(take_lock(Lock::kTake));
  if (!announced_in(root_).empty()) STRATA_RETURN_IF_ERROR(name_latest(root_));
  STRATA_RETURN_IF_ERROR(put_right());
  put_others_right();
  return result(::mkdir(partial_.c_str(), 0777) != 0 ? errno : 0, "making " + partial_);
}

Status ModelParts::put_right() const {
  if (is_directory(replaced_)) {
    ::rmdir(committed_.c_str());  // does nothing unless it is empty
    if (!exists(committed_)) STRATA_RETURN_IF_ERROR(rename(replaced_, committed_));
  }
  STRATA_RETURN_IF_ERROR(require_replaceable());
  ::unlink(announcement().c_str());
  const std::string aside = root_ + "/." + tag_ + ".left.";
  STRATA_RETURN_IF_ERROR(clear(replaced_, aside));
  return clear(partial_, aside);
}

// A run that goes on from its newest checkpoint does not save that one again. What cannot be put right is left.
void ModelParts::put_others_right() const {
  std::vector<fs::path> all;
  (void)list(root_, &all);
  for (const fs::path& path : all) {
    const std::string name = path.filename(), end = ".lock";
    if (name.size() < 2 + end.size() || name[0] != '.' || path.extension() != end) continue;
    ModelParts other(places_, checkpoint_, root_, name.substr(1, name.size() - 1 - end.size()));
    if (other.tag_ != tag_ && other.take_lock(Lock::kOfTheDead).ok()) (void)other.put_right();
  }
}

Status ModelParts::require_replaceable() const {
  if (!exists(committed_)) return Ok();
  std::vector<fs::path> parts;
  std::string stranger;
  STRATA_RETURN_IF_ERROR(find_stranger(committed_, tag_, &parts, &stranger));
  if (!stranger.empty()) {
    return {STRATA_ALREADY_EXISTS, committed_ + " is there, is no checkpoint of a model in parts" +
                                       (stranger == committed_ ? "" : " alone (" + stranger + ")") +
                                       ", and is not replaced"};
  }
  for (const fs::path& part : parts) {
    const strata_status code = checkpoint_.api()->may_replace(checkpoint_.self(), part.c_str(), tag_.c_str());
    STRATA_RETURN_IF_ERROR(take_failure(code));
  }
  return Ok();
}

// Other ranks take their files away meanwhile: a walk that meets a hole begins again.
void ModelParts::abandon() const {
  std::error_code ignored;  // what is left over is found again by the next save
  for (int walk = 0; walk < 10 && exists(partial_); ++walk) fs::remove_all(partial_, ignored);
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

Status ModelParts::publish() const {
  const Status published = make_latest();
  std::error_code ignored;  // what is left over is found again by the next save
  abandon();
  if (is_directory(committed_)) fs::remove_all(replaced_, ignored);
  ::unlink(announcement().c_str());
  return published.ok() ? sync_path(root_) : published;
}

// A new name is announced first: after a kill between the renames, a load finds the newer checkpoint. One that is there
// would count at once: it is announced when it has been replaced. What `latest` will be is written before either, so
// that a full disk is an error before anything has changed.
Status ModelParts::make_latest() const {
  STRATA_RETURN_IF_ERROR(require_replaceable());
  const bool is_new = !exists(committed_);
  const std::string next = root_ + "/.latest.next";
  STRATA_RETURN_IF_ERROR(sync_path(partial_));
  STRATA_RETURN_IF_ERROR(write_file(announcement(), tag_ + "\n"));
  if (is_new) STRATA_RETURN_IF_ERROR(rename(announcement(), next));
  STRATA_RETURN_IF_ERROR(sync_path(root_));
  STRATA_RETURN_IF_ERROR(take_name());
  STRATA_RETURN_IF_ERROR(sync_path(root_));
  if (!is_new) STRATA_RETURN_IF_ERROR(rename(announcement(), next));
  return name_latest(root_);
}

Status ModelParts::find(const Places& places, const std::string& root, const char* tag, std::string* part_root,
                        std::string* found) {
  *found = tag ? tag : latest_of(root);
  *part_root = root;
  const bool parts = places.parts() > 1;
  const std::string directory = directory_of(root, *found);
  if (found->empty() || !exists(directory)) return Ok();  // the plugin says what there is
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
  return !parts || exists(*part_root) ? Ok() : Status(STRATA_DATA_LOSS, *part_root + ": this part is missing");
}

std::string ModelParts::file_of_part(const Places& places, const std::string& file) {
  if (places.parts() == 1) return file;
  const fs::path path(file);
  return path.stem().string() + "." + places.part_name() + path.extension().string();
}

}  // namespace strata
