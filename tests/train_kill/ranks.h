// ranks.h - processes of train_on_disk: started, watched through /proc, killed, waited for.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "tests/train_kill/job.h"

namespace strata::test {

struct Start {
  OnDisk what;
  std::string nvme_path, checkpoints, out;  // `out`.<rank> gets the output
  int steps;
  std::string tag = "";  // of every checkpoint; "": one per step
};

class Ranks {
 public:
  explicit Ranks(const Start& start);
  ~Ranks();  // kills who is left
  Ranks(const Ranks&) = delete;

  void kill(const std::vector<int>& ranks);
  // Their exit codes, or minus the signal; whoever does not end in time is killed and counts as 1000.
  std::vector<int> wait(std::chrono::seconds patience = std::chrono::seconds(90));
  bool all_ended();
  // How much a rank has said, and what last.
  int lines(int rank) const;
  std::string last_line(int rank) const;
  std::string output(int rank) const;

  // Whether io_uring has transfers of this rank under way, or one of its threads is in pwrite on a segment.
  bool has_transfers_in_flight(int rank) const;
  bool is_inside_a_write(int rank) const;

 private:
  std::string proc(int rank) const { return "/proc/" + std::to_string(pids_[static_cast<size_t>(rank)]) + "/"; }
  const Start start_;
  std::vector<pid_t> pids_;
  std::vector<int> codes_;
};

}  // namespace strata::test
