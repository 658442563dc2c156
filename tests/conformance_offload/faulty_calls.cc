#include "faulty_calls.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <type_traits>

#include "io/calls.h"

namespace strata::test {

Faults& faults() {
  static Faults* const one = new Faults;  // threads that a test gave up may still ask at the end
  return *one;
}

void Faults::clear() {
  std::lock_guard lock(mutex_);
  counts_.clear();
  failing_.clear();
  holding_.clear();
  held_ = 0;
  fired_ = false;
  short_transfers = false;
  interrupt_every = 0;
  alignment = 0;
  hang(false);
  hung = late = lost = 0;
  fixed = plain = 0;
  direct_bytes = 0;
}

void Faults::fail(const std::string& call, int nth, int error, bool always) {
  std::lock_guard lock(mutex_);
  failing_ = call;
  nth_ = counts_[call] + nth;
  error_ = error;
  always_ = always;
  fired_ = false;
}

void Faults::hold(const std::string& call) {
  std::lock_guard lock(mutex_);
  holding_ = call;
}

std::map<std::string, int> Faults::counts() const {
  std::lock_guard lock(mutex_);
  return counts_;
}

int Faults::of(const char* call) {
  std::unique_lock lock(mutex_);
  held_ += holding_ == call ? 1 : 0;
  while (holding_ == call) {
    lock.unlock();
    ::usleep(1000);
    lock.lock();
  }
  const int count = ++counts_[call];
  if (failing_ != call || (always_ ? count < nth_ : count != nth_)) return 0;
  fired_ = true;
  return error_;
}

int Faults::of_transfer(const char* call, bool write, bool* was_hung) {
  *was_hung = false;
  if (const int error = of(call)) return error;
  const std::atomic<bool>& hangs = write ? hang_writes : hang_reads;
  *was_hung = hangs;
  hung += *was_hung ? 1 : 0;
  while (hangs) ::usleep(1000);
  const unsigned n = transfers_++;
  if (interrupt_every > 0 && n % static_cast<unsigned>(interrupt_every) == 0) return n % 2 ? EINTR : EAGAIN;
  return 0;
}

uint64_t Faults::shortened(uint64_t bytes) const {
  const uint64_t block = unit();
  return short_transfers && bytes > 2 * block ? bytes / 2 / block * block : bytes;
}

namespace {

int failed(const char* call) {
  errno = faults().of(call);
  return errno ? -1 : 0;
}

bool is_direct(int fd) { return ::fcntl(fd, F_GETFL) & O_DIRECT; }

bool breaks_the_rule(int fd, const void* data, size_t bytes, off_t offset) {
  const uint64_t a = faults().alignment;
  if (a == 0 || !is_direct(fd)) return false;
  return reinterpret_cast<uintptr_t>(data) % a || bytes % a || static_cast<uint64_t>(offset) % a;
}

template <class Real, class Data>
ssize_t transfer(const char* name, Real real, int fd, Data data, size_t bytes, off_t offset) {
  if (breaks_the_rule(fd, data, bytes, offset)) {
    errno = EINVAL;
    return -1;
  }
  bool hung = false;
  errno = faults().of_transfer(name, std::is_same_v<Data, const void*>, &hung);
  if (errno) return -1;
  const ssize_t n = real(fd, data, faults().shortened(bytes), offset);
  if (hung && n < 0 && errno == EFAULT) ++faults().lost;
  if (hung) ++faults().late;
  if (n > 0 && is_direct(fd)) faults().direct_bytes += static_cast<uint64_t>(n);
  return faults().short_transfers && n > static_cast<ssize_t>(faults().unit()) ? n - 17
                                                                               : n;  // and not even whole blocks
}

constexpr io::Calls kFaulty = {
    [](const char* path, int flags, mode_t mode) { return failed("open") ? -1 : ::open(path, flags, mode); },
    [](int fd, void* data, size_t bytes, off_t at) { return transfer("pread", ::pread, fd, data, bytes, at); },
    [](int fd, const void* data, size_t bytes, off_t at) { return transfer("pwrite", ::pwrite, fd, data, bytes, at); },
    [](int fd, int mode, off_t at, off_t bytes) { return failed("fallocate") ? -1 : ::fallocate(fd, mode, at, bytes); },
    [](int fd, off_t bytes) { return failed("ftruncate") ? -1 : ::ftruncate(fd, bytes); },
    [](int fd) { return failed("fsync") ? -1 : ::fsync(fd); },
    [](const char* path, mode_t mode) { return failed("mkdir") ? -1 : ::mkdir(path, mode); },
    [](int fd, int operation) { return failed("flock") ? -1 : ::flock(fd, operation); },
    [](int fd, const char* path, int flags, unsigned mask, struct statx* out) {
      return faults().alignment || failed("statx") ? -1 : ::statx(fd, path, flags, mask, out);
    },
    [](int fd, struct stat* out) { return failed("fstat") ? -1 : ::fstat(fd, out); },
    [](const char* path, struct statvfs* out) { return failed("statvfs") ? -1 : ::statvfs(path, out); },
    [](const char* path) { return failed("unlink") ? -1 : ::unlink(path); },
    [](const char* path) { return failed("rmdir") ? -1 : ::rmdir(path); },
    [](int fd, uint64_t value) { return failed("eventfd_write") ? -1 : ::eventfd_write(fd, value); },
};

}  // namespace
}  // namespace strata::test

namespace strata::io {
const Calls& calls() { return test::kFaulty; }
}  // namespace strata::io
