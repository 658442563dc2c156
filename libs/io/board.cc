#include "io/board.h"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace strata::io {
namespace {

constexpr unsigned kStalls = 8;  // transfers in a row that move less than the alignment

}  // namespace

void Board::set_slots(unsigned count) {
  slots_.resize(count);
  for (unsigned slot = count; slot > 0; --slot) free_.push_back(slot - 1);
}

bool Board::submit(Request request) {
  auto item = std::make_shared<Item>();
  item->request = std::move(request);
  std::unique_lock lock(mutex_);
  ++untold_;
  if (dead_ || item->request.bytes == 0) {
    const Report ended = report(item.get(), dead_);
    lock.unlock();
    ended();
    return false;
  }
  const bool many = item->request.bytes > options_.block_bytes;
  lines_[item->request.write].push_back(std::move(item));
  many ? wake_.notify_all() : wake_.notify_one();
  return std::exchange(sleeping_, false);
}

void Board::wait_until_told() {
  std::unique_lock lock(mutex_);
  told_.wait(lock, [this] { return telling_ == 0 && untold_ == 0; });
}

void Board::stop() {
  std::lock_guard lock(mutex_);
  stop_ = true;
  wake_.notify_all();
  stopping_.notify_all();
}

bool Board::is_over() {
  std::lock_guard lock(mutex_);
  return stop_ && is_idle();
}

std::chrono::nanoseconds Board::busy() {
  std::lock_guard lock(mutex_);
  return is_idle() ? busy_ : busy_ + (Clock::now() - busy_since_);
}

void Board::watch() {
  const auto period = std::clamp<std::chrono::nanoseconds>(options_.deadline / 4, std::chrono::milliseconds(5),
                                                           std::chrono::seconds(1));
  std::unique_lock lock(mutex_);
  while (!stopping_.wait_for(lock, period, [this] { return stop_; })) {
    lock.unlock();
    expire();
    lock.lock();
  }
}

void Board::expire() {
  std::unique_lock lock(mutex_);
  const auto oldest = Clock::now() - options_.deadline;
  const bool late =
      std::any_of(slots_.begin(), slots_.end(), [&](const Slot& s) { return s.item && s.since < oldest; });
  if (late) end_all(ETIMEDOUT, true, lock);
}

void Board::fail_all(int error) {
  std::unique_lock lock(mutex_);
  end_all(error, false, lock);
}

// No piece is taken any more. What is under way may use its memory: unless `at_once`, its request ends with it.
void Board::end_all(int error, bool at_once, std::unique_lock<std::mutex>& lock) {
  if (!dead_) dead_ = error;
  std::vector<std::shared_ptr<Item>> items;
  for (auto& line : lines_) {
    items.insert(items.end(), line.begin(), line.end());
    line.clear();
  }
  for (const Slot& slot : again_) {
    --slot.item->out;
    items.push_back(slot.item);
  }
  again_.clear();
  for (const Slot& slot : slots_) {
    if (slot.item) items.push_back(slot.item);
  }
  std::vector<Report> reports;
  for (const auto& item : items) {
    if (!item->error) item->error = error;
    if (item->reported || (item->out > 0 && !at_once)) continue;
    reports.push_back(report(item.get(), at_once ? error : item->error));
  }
  tell(reports, lock);
}

// Makes the calls without the lock; the queue does not go meanwhile.
void Board::tell(const std::vector<Report>& reports, std::unique_lock<std::mutex>& lock) {
  ++telling_;
  lock.unlock();
  for (const Report& each : reports) each();
  lock.lock();
  --telling_;
  told_.notify_all();
}

// The call that ends a request, to be made without the lock.
Board::Report Board::report(Item* item, int error) {
  item->reported = true;
  --untold_;
  return [done = std::move(item->request.done), error, moved = item->moved] {
    if (done) done(error, moved);
  };
}

bool Board::next(Slot* slot) {
  if (!again_.empty()) {
    *slot = std::move(again_.front());
    again_.pop_front();
    return true;
  }
  if (!lines_[turn_].empty() || !lines_[!turn_].empty()) {
    auto& line = lines_[turn_].empty() ? lines_[!turn_] : lines_[turn_];
    turn_ = !turn_;
    const std::shared_ptr<Item> item = line.front();
    const uint64_t bytes = std::min(options_.block_bytes, item->request.bytes - item->taken);
    *slot = {item, item->taken, bytes, Clock::now(), 0};
    item->taken += bytes;
    ++item->out;
    if (item->taken == item->request.bytes) line.pop_front();
    return true;
  }
  return false;
}

bool Board::take_locked(unsigned* slot, Piece* piece) {
  if (free_.empty()) return false;  // a completion comes first, and its server looks again
  Slot taken;
  if (!next(&taken)) {
    sleeping_ = true;
    return false;
  }
  if (is_idle()) busy_since_ = Clock::now();
  *slot = free_.back();
  free_.pop_back();
  const Request& r = taken.item->request;
  *piece = {r.write, r.file.fd->get(), r.file.slot, r.offset + taken.at, taken.bytes, r.data + taken.at};
  slots_[*slot] = std::move(taken);
  return true;
}

bool Board::take(unsigned* slot, Piece* piece) {
  std::lock_guard lock(mutex_);
  return take_locked(slot, piece);
}

bool Board::wait_take(unsigned* slot, Piece* piece) {
  std::unique_lock lock(mutex_);
  while (!take_locked(slot, piece)) {
    if (stop_) return false;
    wake_.wait(lock);
  }
  return true;
}

// Whether there is more to move of this piece: then it is cut down to that. Sets the item's error.
bool Board::go_on(Slot* slot, int64_t result) {
  Item& item = *slot->item;
  if (result == -EINTR || result == -EAGAIN) return true;
  if (result < 0) {
    item.error = static_cast<int>(-result);
    return false;
  }
  const auto answered = static_cast<uint64_t>(result);
  const uint64_t moved = answered >= slot->bytes ? slot->bytes : answered / options_.alignment * options_.alignment;
  item.moved += moved;
  slot->at += moved;
  slot->bytes -= moved;
  if (slot->bytes == 0) return false;
  slot->stalls = moved > 0 ? 0 : slot->stalls + 1;
  if (moved > 0) slot->since = Clock::now();
  if (result == 0 || slot->stalls > kStalls) item.error = item.request.write ? EIO : ENODATA;
  return item.error == 0;
}

// Takes the rest of a failed request out of the lines.
void Board::drop(const Item* item) {
  auto& line = lines_[item->request.write];
  line.erase(std::remove_if(line.begin(), line.end(), [item](const auto& each) { return each.get() == item; }),
             line.end());
  for (auto piece = again_.begin(); piece != again_.end();) {
    if (piece->item.get() != item) {
      ++piece;
      continue;
    }
    --piece->item->out;
    piece = again_.erase(piece);
  }
}

void Board::finish(unsigned index, int64_t result) {
  std::unique_lock lock(mutex_);
  Slot slot = std::move(slots_[index]);
  slots_[index] = {};
  free_.push_back(index);
  if (is_idle()) busy_ += Clock::now() - busy_since_;
  const std::shared_ptr<Item> item = slot.item;
  if (!item->error && go_on(&slot, result)) {
    again_.push_back(std::move(slot));
    return;
  }
  --item->out;
  if (item->error) drop(item.get());
  const bool all = item->error || item->taken == item->request.bytes;
  if (all && item->out == 0 && !item->reported) tell({report(item.get(), item->error)}, lock);
}

}  // namespace strata::io
