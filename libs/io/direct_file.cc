#include "io/direct_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "io/calls.h"

namespace strata::io {
namespace {

constexpr int kStalls = 8;  // transfers in a row that move less than a block

// pread or pwrite, until all is moved. What a short transfer moved counts in whole blocks only.
template <class Call, class Data>
int move_all(Call call, int at_end, int fd, Data data, uint64_t bytes, uint64_t offset, uint64_t block) {
  for (int stalls = 0; bytes > 0;) {
    const ssize_t n = call(fd, data, std::min<uint64_t>(bytes, uint64_t{1} << 30), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    const auto answered = static_cast<uint64_t>(n);
    const uint64_t moved = answered == bytes ? bytes : answered / block * block;
    stalls = moved > 0 ? 0 : stalls + 1;
    if (n == 0 || stalls > kStalls) return at_end;
    data += moved;
    bytes -= moved;
    offset += moved;
  }
  return 0;
}

int write_all(int fd, const char* data, uint64_t bytes, uint64_t offset, uint64_t block = 1) {
  return move_all(calls().pwrite, EIO, fd, data, bytes, offset, block);
}

int read_all(int fd, char* data, uint64_t bytes, uint64_t offset, uint64_t block = 1) {
  return move_all(calls().pread, ENODATA, fd, data, bytes, offset, block);
}

uint64_t to_next(uint64_t offset, uint64_t block) { return (block - offset % block) % block; }

}  // namespace

bool DirectFile::lies_right(uint64_t offset, const void* data) const {
  return (reinterpret_cast<uintptr_t>(data) + to_next(offset, rule_.offset)) % rule_.memory == 0;
}

DirectFile::Cut DirectFile::cut_for(uint64_t offset, const void* data, uint64_t bytes) const {
  const uint64_t head = to_next(offset, rule_.offset);
  if (!direct() || bytes < std::max(kDirectMinimum, head) || !lies_right(offset, data)) return {bytes, 0};
  return {head, (bytes - head) / rule_.offset * rule_.offset};
}

// A file too small to try it out on is taken to want the most; it has little that could go direct anyway.
int DirectFile::find_rule() {
  struct stat s {};
  if (calls().fstat(direct_fd_, &s) != 0) return errno;
  const bool small = static_cast<uint64_t>(s.st_size) < 2 * kLargestAlignment;
  rule_ = {kLargestAlignment, kLargestAlignment};
  const int error = small ? 0 : find_direct_rule(direct_fd_, &rule_);
  rule_.offset = std::max(rule_.offset, static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)));
  return error;
}

int DirectFile::open(const std::string& path, bool writable, bool direct) {
  close();
  const int flags = (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC;
  fd_ = calls().open(path.c_str(), flags, 0);
  if (fd_ < 0) return errno;
  if (direct) direct_fd_ = calls().open(path.c_str(), flags | O_DIRECT, 0);
  if (direct_fd_ < 0) return 0;
  const int error = find_rule();
  direct_ok_ = error == 0;
  if (error) rule_ = {};
  return error == EINVAL ? 0 : error;  // EINVAL: opened, but this file system cannot do it
}

void DirectFile::close() {
  if (fd_ >= 0) ::close(fd_);
  if (direct_fd_ >= 0) ::close(direct_fd_);
  fd_ = direct_fd_ = -1;
  direct_ok_ = false;
  rule_ = {};
}

int DirectFile::write_at(uint64_t offset, const void* data, uint64_t bytes) {
  auto* p = static_cast<const char*>(data);
  const Cut cut = cut_for(offset, data, bytes);
  if (int e = write_all(fd_, p, cut.head, offset)) return e;
  int e = cut.middle ? write_all(direct_fd_, p + cut.head, cut.middle, offset + cut.head, rule_.offset) : 0;
  if (e == EINVAL) {  // opened and tried, but this file system cannot do it
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
  int e = cut.middle ? read_all(direct_fd_, p + cut.head, cut.middle, offset + cut.head, rule_.offset) : 0;
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
