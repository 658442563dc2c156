#include "control_channel/ledger.h"

namespace strata::control_channel {

using plugin_kit::join;

std::string title(const Post& post) {
  return join("call ", post.call, ", ", collective_kit::titled(post.op, post.label));
}

Ledger::Entry::Entry(const Announcement& said) : deadline(Deadline::after(said.deadline_ns)), first(said.post) {}

Error Ledger::add(int rank, const Announcement& said) {
  const uint64_t index = calls_[static_cast<size_t>(rank)]++ - done_;
  begun_[static_cast<size_t>(rank)] = said.post.call;
  if (index == open_.size()) open_.emplace_back(said);
  Entry& entry = open_[index];
  if (Error e = compare(&entry, rank, said.post); !e.ok()) return e;
  if (++entry.seen == calls_.size()) {
    open_.pop_front();  // nobody posts a call before the one in front of it
    ++done_;
  }
  return somebody_left();
}

Error Ledger::compare(Entry* entry, int rank, const Post& post) {
  if (rank != 0 && !entry->rank0) {
    entry->ahead_of_rank0.emplace_back(rank, post);
    return {};
  }
  if (rank == 0) entry->rank0 = post;
  if (rank != 0) entry->ahead_of_rank0.emplace_back(rank, post);
  for (const auto& [other, theirs] : entry->ahead_of_rank0) {
    if (collective_kit::same(*entry->rank0, theirs)) continue;
    return {STRATA_FAILED_PRECONDITION, collective_kit::difference(*entry->rank0, number_(0), theirs, number_(other))};
  }
  entry->ahead_of_rank0.clear();
  return {};
}

Error Ledger::leave(int rank) {
  left_[static_cast<size_t>(rank)] = true;
  return somebody_left();
}

Error Ledger::somebody_left() const {
  if (open_.empty()) return {};
  for (size_t r = 0; r < calls_.size(); ++r) {
    if (!left_[r] || calls_[r] >= done_ + open_.size()) continue;
    const Entry& entry = open_[calls_[r] - done_];
    return {STRATA_UNAVAILABLE, join(title(entry.first), ": ", name_(static_cast<int>(r)), " closed, ",
                                     progress(static_cast<int>(r)), ", while others wait for it")};
  }
  return {};
}

Error Ledger::overdue() const {
  if (open_.empty() || !open_.front().deadline.passed()) return {};
  const Entry& entry = open_.front();
  std::string missing;
  for (size_t r = 0; r < calls_.size(); ++r) {
    if (calls_[r] > done_) continue;
    missing +=
        join(missing.empty() ? "" : ", ", name_(static_cast<int>(r)), " is missing, ", progress(static_cast<int>(r)));
  }
  return {STRATA_DEADLINE_EXCEEDED, join(title(entry.first), ": waited ", entry.deadline.text(), ": ", missing)};
}

std::string Ledger::newest() const { return open_.empty() ? "" : title(open_.back().first) + ": "; }

std::string Ledger::progress(int rank) const {
  return join("after it began ", begun_[static_cast<size_t>(rank)], " collectives");
}

}  // namespace strata::control_channel
