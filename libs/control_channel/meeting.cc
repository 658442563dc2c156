// meeting.cc - see meeting.h: the part of a guest.
#include "control_channel/meeting.h"

#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <thread>

namespace strata::control_channel {
namespace {

using plugin_kit::join;

constexpr int kAttemptMs = 1000;
constexpr std::chrono::milliseconds kBetweenAttempts{20};

Hello hello_of(const Place& place, uint32_t lane) {
  Hello hello{};
  hello.magic = kMagic;
  hello.version = kVersion;
  hello.post_bytes = sizeof(Announcement);
  hello.lane = lane;
  hello.rank = place.rank;
  hello.world = place.world;
  hello.person = this_process();
  hello.job_hash = hash_of(place.job);
  std::strncpy(hello.job, place.job.c_str(), sizeof(hello.job) - 1);
  return hello;
}

bool hung_up(const Fd& socket) {
  pollfd one = {socket.get(), POLLRDHUP, 0};
  return ::poll(&one, 1, 0) > 0;
}

bool stopped(const Place& place) {
  pollfd one = {place.stop, POLLIN, 0};
  return place.stop >= 0 && ::poll(&one, 1, 0) > 0;
}

// Waits for rank 0 to be there. Once it was, on the lane `earlier`, it is waited for only as long as that one is open.
Error open_lane(const Place& place, uint32_t lane, const Fd& earlier, const Deadline& deadline, Fd* out) {
  for (;;) {
    const Error e = connect_to(place.address, deadline.poll_ms(kAttemptMs), out);
    if (e.ok()) break;
    if (e.code() != STRATA_NOT_FOUND) return {e.code(), opening(place) + ": " + e.text()};
    if (stopped(place)) return {STRATA_CANCELLED, opening(place) + ": the job it is a part of has failed"};
    if (deadline.passed() || (earlier && hung_up(earlier))) {
      return {STRATA_DEADLINE_EXCEEDED, join(opening(place), ": waited ", deadline.text(), " for rank 0: ", e.text())};
    }
    std::this_thread::sleep_for(kBetweenAttempts);
  }
  const Hello hello = hello_of(place, lane);
  if (send_all(out->get(), &hello, sizeof(hello), deadline, -1) == Outcome::kDone) return {};
  return {STRATA_UNAVAILABLE, join(opening(place), ": rank 0 at ", place.address.text, " closed at once")};
}

// Listens until rank 0 says that all are there.
Error wait_for_start(const Place& place, const Deadline& deadline, std::vector<Seat>* seats) {
  const int socket = (*seats)[0].control.get();
  std::string missing;
  for (;;) {
    Header header{};
    Outcome outcome = receive_all(socket, &header, sizeof(header), deadline, place.stop, false);
    std::string payload(outcome == Outcome::kDone ? header.bytes : 0, '\0');
    if (outcome == Outcome::kDone) outcome = receive_all(socket, payload.data(), payload.size(), deadline, -1, false);
    if (outcome == Outcome::kLate) {
      return {STRATA_DEADLINE_EXCEEDED, join(opening(place), ": waited ", deadline.text(), " for ",
                                             missing.empty() ? "rank 0 to answer" : missing)};
    }
    if (outcome != Outcome::kDone) {
      return {STRATA_UNAVAILABLE,
              join(opening(place), ": rank 0 at ", place.address.text, " ended before all ranks had come",
                   missing.empty() ? "" : "; still missing: ", missing)};
    }
    if (header.type == Type::kWaiting) missing = payload;
    if (header.type == Type::kFail) {
      return {payload_as<Failure>(payload).code, payload.substr(std::min(payload.size(), sizeof(Failure)))};
    }
    if (header.type != Type::kStart) continue;
    if (payload.size() != seats->size() * sizeof(Person)) {
      return {STRATA_INTERNAL, opening(place) + ": rank 0 sent a list of another length"};
    }
    for (size_t r = 0; r < seats->size(); ++r) {
      std::memcpy(&(*seats)[r].person, payload.data() + r * sizeof(Person), sizeof(Person));
    }
    return {};
  }
}

}  // namespace

Person this_process() {
  Person person{};
  person.pid = static_cast<uint32_t>(::getpid());
  ::gethostname(person.host, sizeof(person.host) - 1);
  return person;
}

uint64_t hash_of(const std::string& job) {
  uint64_t hash = 14695981039346656037u;
  for (char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return hash;
}

bool same_machine(const Person& person) { return std::strcmp(this_process().host, person.host) == 0; }

std::string name_of(int rank, const Person& person) {
  const Person own = this_process();
  const bool here = same_machine(person);
  if (person.pid == 0 || (here && person.pid == own.pid)) return join("rank ", rank);
  return join("rank ", rank, " (pid ", person.pid, here ? "" : " on ", here ? "" : person.host, ")");
}

std::string opening(const Place& place) {
  return join("opening rank ", place.rank, " of job \"", place.job, "\" (world ", place.world, ")");
}

Error meet(const Place& place, const Deadline& deadline, std::vector<Seat>* out) {
  out->clear();
  out->resize(static_cast<size_t>(place.world));
  (*out)[static_cast<size_t>(place.rank)].person = this_process();
  if (place.world == 1) return {};
  if (place.rank == 0) return meet_as_rank0(place, deadline, out);
  Seat& rank0 = (*out)[0];
  if (Error e = open_lane(place, 0, Fd(), deadline, &rank0.control); !e.ok()) return e;
  Error e = open_lane(place, 1, rank0.control, deadline, &rank0.exchange);
  if (!e.ok() && !hung_up(rank0.control)) return e;  // else it said why on its first lane
  return wait_for_start(place, deadline, out);
}

}  // namespace strata::control_channel
