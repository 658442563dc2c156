// patience.h - calls that make, grow, shrink and remove files, bounded: they return when the disk answers, and nobody
// can leave one that he is in.
//
// So each is made on a thread of its own. Where the disk does not answer within the deadline, that thread is left
// behind, with what the call owns, and the disk is asked nothing more: further calls fail at once. The thread ends when
// the disk answers, if ever.
//
// Threads: any.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "io/fd.h"
#include "plugin_kit/deadline.h"

namespace strata::offload_nvme {

class Patience {
 public:
  explicit Patience(std::chrono::nanoseconds length) : length_(length) {}
  Patience(const Patience&) = delete;

  // 0 or an errno, as `call` returns it; ETIMEDOUT when there is no answer. It owns what it uses, and lets go of it
  // before this returns, as to close a file may wait for the disk, too. `what` is for texts: "unlink of /disk/file".
  int ask(const std::string& what, std::function<int()> call);
  // The same of an open.
  int open(const std::string& path, int flags, std::shared_ptr<io::Fd>* out);
  // The disk has failed to answer.
  bool is_over() const;
  // Of an errno: "unlink of /disk/file: the disk did not answer within 10.000 s", of the call that it did not answer.
  std::string text_of(int error) const;
  // "<what> <path>: <text>" with the status of `error`.
  [[noreturn]] void raise(int error, const std::string& what, const std::string& path) const;

  plugin_kit::Deadline deadline() const { return plugin_kit::Deadline(length_); }

 private:
  const std::chrono::nanoseconds length_;
  mutable std::mutex mutex_;
  std::string unanswered_;  // the first such call
};

}  // namespace strata::offload_nvme
