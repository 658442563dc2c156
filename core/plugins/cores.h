// cores.h - the CPUs that a rank's threads run on, and the NUMA node its host memory comes from.
//
// Ranks of one machine whose processes may use the same CPUs divide them: consecutive shares in the order of NUMA
// nodes, whole physical cores (hyperthreads stay with their core) as long as there is one for every rank. What a
// launcher gave to one rank alone (taskset, srun, numactl) is that rank's as it is. A rank's threads are bound to its
// share as one set, inside of which the kernel moves them. Nothing is bound where there are more ranks than CPUs, or
// where a share is all that the process may use: engines beside each other in one process never meet on one CPU by
// our doing. The host program's own threads are never bound.
//
// What cannot be read or set (a sandbox forbids it) is as if it were not there: binding is speed, not correctness.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/status.h"

namespace strata {

struct Cpu {
  int id = 0;
  int node = 0;  // NUMA
  int core = 0;  // the first CPU of the physical core it belongs to
};

// "0-2,8" and back.
std::vector<int> parse_cpu_list(const std::string& text);
std::string cpu_list_text(const std::vector<int>& cpus);

// The CPUs the calling thread may use, ascending.
std::vector<int> allowed_cpus();
// Where they are. `root` stands before /sys; tests give a folder of their own.
std::vector<Cpu> read_cpus(const std::vector<int>& allowed, const std::string& root = "");
// CPUs' worth of time per second that the process's control group allows; 0: as many as there are.
double cpu_quota(const std::string& root = "");
// A number that processes have equal when they may use the same CPUs of the same machine.
uint64_t cpus_fingerprint(const std::vector<int>& allowed);

struct CoreShare {
  std::vector<int> cpus;                 // ascending
  int node = -1;                         // of all of them, on a machine with several nodes
  bool is_part = false;                  // not all that the process may use: threads are bound to them
  unsigned threads(double quota) const;  // how many are worth having
  size_t ranks = 1;                      // that divide what the process may use
};
// Share `part` of `parts`.
CoreShare share_of(std::vector<Cpu> cpus, size_t part, size_t parts);

// A thread of `work`, bound to `cpus`; RESOURCE_EXHAUSTED that says `what` it is for where the system has none.
Status begin_thread(const std::string& what, const std::vector<int>& cpus, std::function<void()> work,
                    std::thread* out);
// Binds the calling thread; no CPUs: leaves it as it is.
void bind_this_thread(const std::vector<int>& cpus);

// While it lives, fresh memory that the calling thread touches first comes from a node where it can; -1: from wherever
// it did before. Page-locked memory is touched by whoever allocates it.
class MemoryNear {
 public:
  explicit MemoryNear(int node);
  ~MemoryNear();
  MemoryNear(const MemoryNear&) = delete;

 private:
  int old_mode_ = 0;
  std::vector<unsigned long> old_nodes_;
  bool set_ = false;
};

}  // namespace strata
