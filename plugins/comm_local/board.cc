#include "board.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>

namespace comm_local {
namespace {

constexpr int64_t kSliceNs = 10'000'000;
// Longer than ranks are apart after an even piece of work; shorter than anybody would notice as a burnt core.
constexpr int64_t kSpinNs = 200'000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// True when the process is stopped (SIGSTOP, a debugger). Only for the words of an error.
bool is_stopped(uint32_t pid) {
  std::FILE* file = std::fopen(("/proc/" + std::to_string(pid) + "/stat").c_str(), "re");
  if (!file) return false;
  char line[512] = {};
  const bool read = std::fgets(line, sizeof(line), file) != nullptr;
  std::fclose(file);
  const char* name_end = read ? std::strrchr(line, ')') : nullptr;
  return name_end && (name_end[2] == 'T' || name_end[2] == 't');
}

}  // namespace

Board::Board(Area* area, int rank, int world) : area_(area), rank_(rank), world_(world) {}

void Board::belong_to(Board* whole, const std::vector<int>& members) {
  whole_ = whole;
  for (int rank : members) numbers_.push_back(whole->number(rank));
}

void Board::come() {
  SharedSeat& own = mine();
  if (sched_getaffinity(0, sizeof(own.cpus), &own.cpus) != 0) CPU_ZERO(&own.cpus);
  own.pid.store(static_cast<uint32_t>(::getpid()));
}

void Board::settle() {
  cpu_set_t together;
  CPU_ZERO(&together);
  for (int r = 0; r < world_; ++r) CPU_OR(&together, &together, &seat(r).cpus);
  may_spin_ = world_ <= CPU_COUNT(&together);
}

void Board::leave() {
  mine().left.store(1);
  ring();
}

std::string Board::who(int rank) const {
  const uint32_t pid = seat(rank).pid.load();
  const bool thread = pid == static_cast<uint32_t>(::getpid());
  return "rank " + std::to_string(number(rank)) + (pid && !thread ? " (pid " + std::to_string(pid) + ")" : "");
}

bool Board::reached(int rank, uint32_t step) const { return static_cast<int32_t>(seat(rank).step.load() - step) >= 0; }

bool Board::all_reached(uint32_t step) const {
  for (int r = 0; r < world_; ++r) {
    if (!reached(r, step)) return false;
  }
  return true;
}

bool Board::spin(uint32_t step) const {
  if (!may_spin_) return false;
  const Deadline end = Deadline::after(kSpinNs);
  do {
    for (int i = 0; i < 32; ++i) {
      if (all_reached(step)) return true;
      pause();
    }
  } while (!end.passed());
  return false;
}

// The bell moves first and the sleepers are counted after; a sleeper counts itself first and the kernel compares the
// bell after. One of the two sees the other, so no ring is missed.
void Board::ring() {
  area_->bell.fetch_add(1);
  if (area_->sleepers.load() > 0) syscall(SYS_futex, &area_->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Board::sleep(uint32_t bell, int64_t ns) {
  const timespec timeout = {static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  area_->sleepers.fetch_add(1);
  syscall(SYS_futex, &area_->bell, FUTEX_WAIT, bell, &timeout, nullptr, 0);
  area_->sleepers.fetch_sub(1);
}

Error Board::sync(const std::string& what, const Deadline& deadline) {
  const uint32_t step = ++step_;
  mine().step.store(step);
  if (all_reached(step)) {
    ring();
    return {};
  }
  if (spin(step)) return {};
  for (;;) {
    const uint32_t bell = area_->bell.load();
    const bool late = deadline.passed();
    if (all_reached(step)) return {};
    // A rank may have gone through this step and failed in the next: then the step is complete all the same.
    if (Error e = failure(); !e.ok()) return all_reached(step) ? Error() : e;
    if (Error e = look_at_missing(step, what, late, deadline); !e.ok()) return fail(e);
    sleep(bell, std::max<int64_t>(1'000, std::min(kSliceNs, deadline.left_ns())));
  }
}

std::vector<bool> Board::dead() const {
  std::vector<bool> result(static_cast<size_t>(world_), false);
  std::vector<pollfd> polls;
  for (const Fd& fd : pidfds_) polls.push_back({fd.get(), POLLIN, 0});
  if (polls.empty() || ::poll(polls.data(), polls.size(), 0) <= 0) return result;
  for (size_t r = 0; r < polls.size(); ++r) result[r] = (polls[r].revents & POLLIN) != 0;
  return result;
}

// Ends a wait that cannot succeed. A rank's end is read before its step: its last step is final by then, so a rank that
// arrived and then left or died is not blamed for a step it reached.
Error Board::look_at_missing(uint32_t step, const std::string& what, bool deadline_passed, const Deadline& deadline) {
  const std::vector<bool> is_dead = dead();
  std::string late;
  for (int r = 0; r < world_; ++r) {
    const bool left = seat(r).left.load() != 0;
    if (reached(r, step)) continue;
    const std::string calls = "after it began " + std::to_string(seat(r).calls.load()) + " collectives";
    if (left) {
      // It may have left because it failed; then its reason is the better text.
      if (Error e = failure(); !e.ok()) return e;
      return {STRATA_UNAVAILABLE, what + ": " + who(r) + " closed, " + calls + ", while others wait for it"};
    }
    if (is_dead[static_cast<size_t>(r)]) return {STRATA_UNAVAILABLE, what + ": " + who(r) + " died " + calls};
    if (!deadline_passed) continue;
    const uint32_t pid = seat(r).pid.load();
    const bool stopped = pid != 0 && pid != static_cast<uint32_t>(::getpid()) && is_stopped(pid);
    late += (late.empty() ? "" : ", ") + who(r) +
            (pid == 0  ? " never came"
             : stopped ? " is stopped by a signal, " + calls
                       : " is missing, " + calls);
  }
  if (late.empty()) return {};
  return {STRATA_DEADLINE_EXCEEDED, what + ": waited " + deadline.text() + ": " + late};
}

Error Board::fail(const Error& mine_error, const Error& others) {
  std::lock_guard lock(mutex_);
  if (!failure_.ok()) return failure_;
  failure_ = mine_error;
  if (whole_) (void)whole_->fail(mine_error, others);
  SharedSeat& own = mine();
  own.code = others.code();
  const size_t n = std::min(others.text().size(), sizeof(own.text) - 1);
  std::memcpy(own.text, others.text().data(), n);
  own.text[n] = 0;
  own.failed.store(1);
  ring();
  return failure_;
}

Error Board::failure() {
  std::lock_guard lock(mutex_);
  if (!failure_.ok()) return failure_;
  for (int r = 0; r < world_; ++r) {
    const SharedSeat& other = seat(r);
    if (other.failed.load() == 0) continue;
    failure_ = Error(other.code, other.text);
    break;
  }
  if (failure_.ok() && whole_) failure_ = whole_->failure();
  return failure_;
}

Error Board::look(const std::string& what) {
  if (Error e = failure(); !e.ok()) return e;
  const std::vector<bool> is_dead = dead();
  for (int r = 0; r < world_; ++r) {
    if (!is_dead[static_cast<size_t>(r)] || seat(r).left.load() != 0) continue;
    return fail({STRATA_UNAVAILABLE, what + ": " + who(r) + " died"});
  }
  return {};
}

}  // namespace comm_local
