#include "io/direct_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "io/calls.h"

namespace strata::io {
namespace {

int write_all(int fd, const char* data, uint64_t bytes, uint64_t offset) {
  while (bytes > 0) {
    const ssize_t n =
        calls().pwrite(fd, data, std::min<uint64_t>(bytes, uint64_t{1} << 30), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    if (n == 0) return EIO;
    data += n;
    bytes -= static_cast<uint64_t>(n);
    offset += static_cast<uint64_t>(n);
  }
  return 0;
}

int read_all(int fd, char* data, uint64_t bytes, uint64_t offset) {
  while (bytes > 0) {
    const ssize_t n = calls().pread(fd, data, std::min<uint64_t>(bytes, uint64_t{1} << 30), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    if (n == 0) return ENODATA;
    data += n;
    bytes -= static_cast<uint64_t>(n);
    offset += static_cast<uint64_t>(n);
  }
  return 0;
}

}  // namespace

DirectFile::Cut DirectFile::cut_for(uint64_t offset, const void* data, uint64_t bytes) const {
  const uint64_t skew = offset % kDirectAlign;
  const bool congruent = reinterpret_cast<uintptr_t>(data) % kDirectAlign == skew;
  if (!direct() || !congruent || bytes < kDirectMinimum) return {bytes, 0};
  const uint64_t head = skew ? kDirectAlign - skew : 0;
  return {head, (bytes - head) / kDirectAlign * kDirectAlign};
}

int DirectFile::open(const std::string& path, bool writable, bool direct) {
  close();
  const int flags = (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC;
  fd_ = calls().open(path.c_str(), flags, 0);
  if (fd_ < 0) return errno;
  if (direct) direct_fd_ = calls().open(path.c_str(), flags | O_DIRECT, 0);
  direct_ok_ = direct_fd_ >= 0;
  return 0;
}

void DirectFile::close() {
  if (fd_ >= 0) ::close(fd_);
  if (direct_fd_ >= 0) ::close(direct_fd_);
  fd_ = direct_fd_ = -1;
  direct_ok_ = false;
}

int DirectFile::write_at(uint64_t offset, const void* data, uint64_t bytes) {
  auto* p = static_cast<const char*>(data);
  const Cut cut = cut_for(offset, data, bytes);
  if (int e = write_all(fd_, p, cut.head, offset)) return e;
  int e = cut.middle ? write_all(direct_fd_, p + cut.head, cut.middle, offset + cut.head) : 0;
  if (e == EINVAL) {  // opened, but this file system cannot do it
    direct_ok_ = false;
    e = write_all(fd_, p + cut.head, cut.middle, offset + cut.head);
  }
  if (e) return e;
  const uint64_t done = cut.head + cut.middle;
  return write_all(fd_, p + done, bytes - done, offset + done);
}

int DirectFile::read_at(uint64_t offset, void* data, uint64_t bytes) const {
  return read_all(fd_, static_cast<char*>(data), bytes, offset);
}

int DirectFile::read_direct_at(uint64_t offset, void* data, uint64_t bytes) {
  auto* p = static_cast<char*>(data);
  const Cut cut = cut_for(offset, data, bytes);
  if (int e = read_all(fd_, p, cut.head, offset)) return e;
  int e = cut.middle ? read_all(direct_fd_, p + cut.head, cut.middle, offset + cut.head) : 0;
  if (e == EINVAL) {
    direct_ok_ = false;
    e = read_all(fd_, p + cut.head, cut.middle, offset + cut.head);
  }
  if (e) return e;
  const uint64_t done = cut.head + cut.middle;
  return read_all(fd_, p + done, bytes - done, offset + done);
}

int DirectFile::sync() { return calls().fsync(fd_) == 0 ? 0 : errno; }

}  // namespace strata::io
