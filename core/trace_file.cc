#include "core/trace_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace strata {

namespace {
Status failed_to(const std::string& what) {
  return {STRATA_UNAVAILABLE, "cannot " + what + ": " + std::strerror(errno)};
}

// LOCK_EX: to have it; LOCK_SH: to see whether anybody does. False: another engine has it.
bool lock(int file, int how) { return flock(file, how | LOCK_NB) == 0 || errno != EWOULDBLOCK; }

bool is_at(int file, const std::string& path) {
  struct stat here {
  }, there{};
  return fstat(file, &here) == 0 && stat(path.c_str(), &there) == 0 && here.st_dev == there.st_dev &&
         here.st_ino == there.st_ino;
}

// The file of that name is held by the engine that wrote it.
bool is_held(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return false;
  const bool held = !lock(file, LOCK_SH);
  close(file);
  return held;
}
}  // namespace

TraceFile::TraceFile(std::string folder, std::string name, int number)
    : folder_(std::move(folder)), name_(std::move(name)), number_(number) {}

TraceFile::~TraceFile() {
  if (held_ < 0) return;
  discard();
  close(held_);
}

Status TraceFile::claim() {
  if (mkdir(folder_.c_str(), 0777) != 0 && errno != EEXIST) return failed_to("make the folder " + folder_);
  Status failed;
  for (int number = number_; failed.ok(); ++number) {
    const std::string suffix = number == 1 ? "" : "." + std::to_string(number);
    is_first_name_ = number == number_;
    if (try_claim(folder_ + "/" + name_ + suffix + ".json", &failed)) return Ok();
  }
  return failed;
}

// False without an error: the name is another engine's.
bool TraceFile::try_claim(const std::string& path, Status* failed) {
  struct stat there {};
  if (stat(path.c_str(), &there) == 0 && S_ISDIR(there.st_mode)) {
    *failed = {STRATA_UNAVAILABLE, "cannot write " + path + ": it is a folder"};
    return false;
  }
  const std::string part = path + ".part";
  const int file = open(part.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (file < 0) {
    *failed = failed_to("write " + part);
    return false;
  }
  // In this order: whoever held the .part and renamed it since holds the file of that name now.
  const bool ours = lock(file, LOCK_EX) && is_at(file, part), free = ours && !is_held(path);
  if (ours && !free) unlink(part.c_str());
  if (!free) {
    close(file);
    return false;
  }
  path_ = path;
  held_ = file;
  return true;
}

// The name may be another engine's by now, if somebody removed the folder.
void TraceFile::discard() {
  if (is_at(held_, part())) unlink(part().c_str());
}

// The stream has a descriptor of its own to close: the lock stays.
Status TraceFile::begin(FILE** file) {
  const int copy = ftruncate(held_, 0) == 0 ? fcntl(held_, F_DUPFD_CLOEXEC, 0) : -1;
  *file = copy < 0 ? nullptr : fdopen(copy, "w");
  if (*file) return Ok();
  const Status failed = failed_to("write " + part());
  if (copy >= 0) close(copy);
  return failed;
}

Status TraceFile::finish(FILE* file) {
  errno = 0;
  const bool is_whole = std::fflush(file) == 0 && !std::ferror(file);
  Status failed = is_whole ? Ok() : failed_to("write " + part());
  if (std::fclose(file) != 0 && is_whole) failed = failed_to("write " + part());
  if (failed.ok() && std::rename(part().c_str(), path_.c_str()) != 0) failed = failed_to("name the file " + path_);
  if (!failed.ok()) discard();
  return failed;
}

}  // namespace strata
