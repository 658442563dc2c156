// calls.h - the system calls by which files are made, written and read, as a table of functions.
//
// Code of libs/io and of the tiers on it calls through the table, so that a test can make any of them fail, come up
// short or hang: it links a definition of `calls` of its own, and the one in calls.cc stays in its archive. The program
// has no way to change the table while it runs.
#pragma once

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>

#include <cstdint>

namespace strata::io {

// As the functions of these names in POSIX and Linux: -1 and errno.
struct Calls {
  int (*open)(const char* path, int flags, mode_t mode);
  ssize_t (*pread)(int fd, void* data, size_t bytes, off_t offset);
  ssize_t (*pwrite)(int fd, const void* data, size_t bytes, off_t offset);
  int (*fallocate)(int fd, int mode, off_t offset, off_t bytes);
  int (*ftruncate)(int fd, off_t bytes);
  int (*fsync)(int fd);
  int (*mkdir)(const char* path, mode_t mode);
  int (*flock)(int fd, int operation);
  int (*statx)(int fd, const char* path, int flags, unsigned mask, struct statx* out);
  int (*fstat)(int fd, struct stat* out);
  int (*statvfs)(const char* path, struct statvfs* out);
  int (*unlink)(const char* path);
  int (*rmdir)(const char* path);
  int (*eventfd_write)(int fd, uint64_t value);
};

const Calls& calls();

}  // namespace strata::io
