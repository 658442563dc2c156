// ledger.h - rank 0's book of what every rank has posted: who differs, who is late, who left while others wait.
//
// Rank r's k-th post is compared with rank 0's k-th, whichever comes first; a call is forgotten when all have posted
// it. A call's deadline runs from its first post. Not thread-safe: the channel's lock guards it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "control_channel/messages.h"
#include "plugin_kit/deadline.h"
#include "plugin_kit/error.h"

namespace strata::control_channel {

using plugin_kit::Deadline;
using plugin_kit::Error;

class Ledger {
 public:
  using NameFn = std::function<std::string(int rank)>;
  using NumberFn = std::function<int(int rank)>;  // in errors
  Ledger(int world, NameFn name, NumberFn number)
      : calls_(static_cast<size_t>(world)),
        begun_(calls_.size()),
        left_(calls_.size()),
        name_(std::move(name)),
        number_(std::move(number)) {}

  // FAILED_PRECONDITION: the ranks differ. UNAVAILABLE: one that has not posted this has left.
  Error add(int rank, const Announcement& said);
  Error leave(int rank);
  // DEADLINE_EXCEEDED, naming who is missing.
  Error overdue() const;
  // "call 7, all_gather [gather layer3]: " about the newest call of anybody; "" before the first.
  std::string newest() const;
  // "after it began 6 collectives"
  std::string progress(int rank) const;

 private:
  struct Entry {
    explicit Entry(const Announcement& first);
    Deadline deadline;
    Post first;
    std::optional<Post> rank0;
    std::vector<std::pair<int, Post>> ahead_of_rank0;
    size_t seen = 0;
  };
  Error compare(Entry* entry, int rank, const Post& post);
  Error somebody_left() const;

  uint64_t done_ = 0;  // calls that all have posted
  std::deque<Entry> open_;
  std::vector<uint64_t> calls_;  // posts of each rank
  std::vector<uint64_t> begun_;  // the number of its newest, which is 0 for what an instance exchanges to open
  std::vector<bool> left_;
  NameFn name_;
  NumberFn number_;
};

// "call 7, all_gather [gather layer3]"
std::string title(const Post& post);

}  // namespace strata::control_channel
