#include "files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>

#include "error.h"
#include "io/fd.h"

namespace strata::checkpoint {
namespace {

using io::Fd;

uint64_t free_bytes(const std::string& directory) {
  struct statvfs s {};
  if (::statvfs(directory.c_str(), &s) != 0) raise_errno(errno, "ask for free space of", directory);
  return static_cast<uint64_t>(s.f_bavail) * s.f_frsize;
}

[[noreturn]] void raise_full(const std::string& path, uint64_t wanted, uint64_t free) {
  raise(STRATA_RESOURCE_EXHAUSTED, path, ": wanted ", wanted, " bytes, ", free, " bytes are free on its file system");
}

std::string directory_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

void write_all(const Fd& fd, const char* data, size_t bytes, off_t offset, const std::string& path) {
  while (bytes > 0) {
    const ssize_t n = ::pwrite(fd.get(), data, bytes, offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) raise_errno(n < 0 ? errno : ENOSPC, "write", path);
    data += n;
    offset += n;
    bytes -= static_cast<size_t>(n);
  }
}

}  // namespace

bool exists(const std::string& path) {
  struct stat s {};
  if (::lstat(path.c_str(), &s) == 0) return true;
  if (errno == ENOENT || errno == ENOTDIR) return false;
  raise_errno(errno, "look at", path);
}

bool is_directory(const std::string& path) {
  struct stat s {};
  return ::lstat(path.c_str(), &s) == 0 && S_ISDIR(s.st_mode);
}

bool same_file(int fd, const std::string& path) {
  struct stat a {
  }, b{};
  return ::fstat(fd, &a) == 0 && ::stat(path.c_str(), &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

uint64_t file_size(const std::string& path) {
  struct stat s {};
  if (::stat(path.c_str(), &s) != 0) raise_errno(errno, "look at", path);
  if (!S_ISREG(s.st_mode)) raise(STRATA_DATA_LOSS, path, ": not a regular file");
  return static_cast<uint64_t>(s.st_size);
}

std::vector<std::string> list_directory(const std::string& path) {
  std::unique_ptr<DIR, int (*)(DIR*)> dir(::opendir(path.c_str()), ::closedir);
  if (!dir) raise_errno(errno, "list directory", path);
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(dir.get())) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  return names;
}

bool make_directory(const std::string& path) {
  struct stat s {};
  const std::string parent = directory_of(path);
  if (::mkdir(path.c_str(), 0777) != 0) {
    const int e = errno;
    if (e == EEXIST && ::stat(path.c_str(), &s) == 0 && S_ISDIR(s.st_mode)) return false;
    if (e == ENOENT && !exists(parent)) raise(STRATA_NOT_FOUND, path, ": there is no directory ", parent);
    raise_errno(e, "make directory", path);
  }
  sync_path(parent);
  return true;
}

void sync_path(const std::string& path) {
  Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) raise_errno(errno, "open for sync", path);
  if (::fsync(fd.get()) != 0) raise_errno(errno, "sync", path);
}

void rename_over(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) raise_errno(errno, "rename " + from + " to", to);
}

void rename_new(const std::string& from, const std::string& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return;
  if (errno == EINVAL || errno == ENOSYS) {  // a file system without that flag
    if (exists(to)) raise_errno(EEXIST, "rename " + from + " to", to);
    rename_over(from, to);
    return;
  }
  raise_errno(errno, "rename " + from + " to", to);
}

bool exchange(const std::string& a, const std::string& b) {
  if (::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return true;
  if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP) return false;
  raise_errno(errno, "exchange " + a + " with", b);
}

std::string read_text_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) raise_errno(errno, "open", path);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_file(const std::string& path, const std::string& text) {
  try {
    Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (fd.get() < 0) raise_errno(errno, "create", path);
    write_all(fd, text.data(), text.size(), 0, path);
    if (::fsync(fd.get()) != 0) raise_errno(errno, "sync", path);
  } catch (...) {
    remove_quietly(path);
    throw;
  }
}

void write_text_file(const std::string& directory, const std::string& name, const std::string& text) {
  const std::string temporary = directory + "/." + name + ".tmp";
  write_file(temporary, text);
  rename_over(temporary, directory + "/" + name);
  sync_path(directory);
}

void write_sparse(const std::string& path, const std::map<uint64_t, std::string>& parts, uint64_t bytes) {
  const Fd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!fd) raise_errno(errno, "create", path);
  for (const auto& [at, part] : parts) {
    if (at < bytes)
      write_all(fd, part.data(), std::min<uint64_t>(part.size(), bytes - at), static_cast<off_t>(at), path);
  }
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) raise_errno(errno, "set the size of", path);
}

void remove_quietly(const std::string& path) { std::remove(path.c_str()); }

void remove_tree(const std::string& path) {
  try {
    if (is_directory(path))
      for (const std::string& name : list_directory(path)) remove_quietly(path + "/" + name);
  } catch (const Error&) {  // not readable: the remove below says nothing either
  }
  remove_quietly(path);
}

void require_space(const std::string& directory, uint64_t wanted) {
  const uint64_t free = free_bytes(directory);
  if (free < wanted) raise_full(directory, wanted, free);
}

bool preallocate(int fd, uint64_t bytes, const std::string& path) {
  while (::fallocate(fd, 0, 0, static_cast<off_t>(bytes)) != 0) {
    if (errno == EINTR) continue;
    if (errno == EOPNOTSUPP || errno == ENOSYS) return false;
    if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG) raise_full(path, bytes, free_bytes(directory_of(path)));
    raise_errno(errno, "allocate blocks of", path);
  }
  return true;
}

WriterLock::~WriterLock() { drop(); }

void WriterLock::drop() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void WriterLock::take(const std::string& path, bool create) {
  if (try_take(path, create)) return;
  raise(STRATA_FAILED_PRECONDITION, path,
        ": is being written by somebody else; do two ranks have the same number, or save to the same tag at once?");
}

bool WriterLock::try_take(const std::string& path, bool create) {
  bool locked = false;
  return open_and_lock(path, create, &locked);
}

bool WriterLock::take_of_the_dead(const std::string& path) {
  bool locked = false;
  if (open_and_lock(path, false, &locked) && locked && same_file(fd_, path)) return true;
  drop();
  return false;
}

bool WriterLock::open_and_lock(const std::string& path, bool create, bool* locked) {
  while (true) {
    drop();
    fd_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC | (create ? O_CREAT : 0), 0666);
    if (fd_ < 0) {
      if (errno == ENOENT && !create) return true;
      raise_errno(errno, "create", path);
    }
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    *locked = ::fcntl(fd_, F_OFD_SETLK, &lock) == 0;
    if (!*locked && (errno == EAGAIN || errno == EACCES)) {
      drop();
      return false;
    }
    if (!create || same_file(fd_, path)) return true;  // else it was renamed or removed meanwhile
  }
}

TagLock::~TagLock() {
  if (!path_.empty()) remove_quietly(path_);
}

void TagLock::take(const std::string& root, const std::string& tag) {
  const std::string path = root + "/." + tag + ".lock";
  if (!lock_.try_take(path, true)) {
    raise(STRATA_FAILED_PRECONDITION, root, "/", tag, ": is being saved by another job, or by another rank 0: ", path,
          " is locked");
  }
  path_ = path;
}

bool TagLock::take_of_the_dead(const std::string& root, const std::string& tag) {
  const std::string path = root + "/." + tag + ".lock";
  if (!lock_.take_of_the_dead(path)) return false;
  path_ = path;
  return true;
}

}  // namespace strata::checkpoint
