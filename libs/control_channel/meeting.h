// meeting.h - how the ranks of a job find each other.
//
// Rank 0 listens; every other rank, a guest, connects twice: a control lane for posts, heartbeats and failures, and an
// exchange lane that the calling thread reads itself. A star, not a mesh: one comparison and one verdict, the same text
// on every rank, and two connections per guest instead of two per pair. It costs an exchange a second hop.
//
// A guest of another job is sent away. Whatever else does not fit (world, rank, version) is an error of this job: rank
// 0 says so to everybody who has come. Strangers are ignored.
#pragma once

#include <memory>
#include <vector>

#include "control_channel/messages.h"
#include "control_channel/socket.h"

namespace strata::control_channel {

struct Place {
  int rank = 0;
  int world = 1;
  std::string job;
  Address address;  // of rank 0
  // Of a part of another job: what rank 0 listens with, which had to have an address first; the ranks' numbers in the
  // whole, for errors; and what becomes readable when the whole has failed.
  std::shared_ptr<const Fd> door = {};
  std::vector<int> numbers = {};
  int stop = -1;

  int number(int r) const { return numbers.empty() ? r : numbers[static_cast<size_t>(r)]; }
};

// One rank as another sees it. Rank 0 has lanes to every guest, a guest only to rank 0.
struct Seat {
  Fd control;
  Fd exchange;
  Person person{};
};

Error meet(const Place& place, const Deadline& deadline, std::vector<Seat>* out);
Error meet_as_rank0(const Place& place, const Deadline& deadline, std::vector<Seat>* out);

Person this_process();
uint64_t hash_of(const std::string& job);
// `rank 2 (pid 4711 on node3)`; the machine only where it is not ours, the process only where it is not ours.
std::string name_of(int rank, const Person& person);
bool same_machine(const Person& person);
std::string opening(const Place& place);

}  // namespace strata::control_channel
