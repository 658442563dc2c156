// direct_file.h - reads and writes of any byte range of a file, past the page cache where the file system allows.
//
// O_DIRECT wants file offset, memory address and length in whole blocks of the file system (alignment.h). A DirectFile
// keeps two descriptors and cuts a transfer into a buffered head, a direct middle and a buffered tail, so that callers
// may name any range; the middle goes direct where its memory is aligned. Blocks count as no smaller than a page, and
// none is written both ways by transfers of disjoint ranges, so the two descriptors do not disturb each other.
//
// A file system may refuse O_DIRECT at open or only at the first use; both end in buffered transfers and `direct()`
// says so: the caller reports it. Threads: all transfers may run at once on disjoint ranges.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "io/alignment.h"

namespace strata::io {

constexpr uint64_t kDirectMinimum = 64 << 10;  // smaller transfers gain nothing from O_DIRECT

class DirectFile {
 public:
  DirectFile() = default;
  ~DirectFile() { close(); }
  DirectFile(const DirectFile&) = delete;
  DirectFile& operator=(const DirectFile&) = delete;

  // Opens an existing file; `direct` asks for O_DIRECT as well. 0 or an errno.
  int open(const std::string& path, bool writable, bool direct);
  void close();

  int fd() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  // True while O_DIRECT is in use: false when it was not asked for or has been refused.
  bool direct() const { return direct_ok_.load(std::memory_order_relaxed); }

  // Whether all of a large transfer but its edges goes direct, if any does. It does with memory that has the remainder
  // of the file offset modulo kLargestAlignment.
  bool lies_right(uint64_t offset, const void* data) const;

  // The whole range or an errno.
  int write_at(uint64_t offset, const void* data, uint64_t bytes);
  // The whole range or an errno; ENODATA when the file ends before it. Through the page cache: for small reads, whose
  // neighbours are likely to be wanted too.
  int read_at(uint64_t offset, void* data, uint64_t bytes) const;
  // The same past the page cache, by the rules of write_at: for large reads.
  int read_direct_at(uint64_t offset, void* data, uint64_t bytes);
  // Data and size are on the disk afterwards. 0 or an errno.
  int sync();

 private:
  struct Cut {
    uint64_t head, middle;  // buffered, direct; what is left is buffered again
  };
  Cut cut_for(uint64_t offset, const void* data, uint64_t bytes) const;
  int find_rule();

  int fd_ = -1;
  int direct_fd_ = -1;
  DirectRule rule_;
  std::atomic<bool> direct_ok_{false};
};

}  // namespace strata::io
