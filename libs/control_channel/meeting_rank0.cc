// meeting_rank0.cc - see meeting.h: rank 0 takes the guests in.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <list>

#include "control_channel/meeting.h"

namespace strata::control_channel {
namespace {

using plugin_kit::join;

constexpr int kSliceMs = 100;

// A connection that has not said who it is.
struct Caller {
  Fd socket;
  std::string said;
};

class Reception {
 public:
  Reception(const Place& place, std::vector<Seat>* seats) : place_(place), seats_(*seats) {}
  Error run(const Deadline& deadline);

 private:
  Error step(const Deadline& deadline);
  void accept_all();
  Error listen_to(Caller* caller, bool* finished);
  Error place(Caller* caller, const Hello& hello);
  Error look_for_the_dead();
  std::string missing() const;
  void tell(const std::string& bytes);
  Error refuse(int socket, Error why);

  const Place& place_;
  std::vector<Seat>& seats_;
  Fd listener_;
  std::list<Caller> callers_;
};

Error Reception::run(const Deadline& deadline) {
  listener_ = place_.door ? Fd(::dup(place_.door->get())) : Fd();
  Error e = listener_ ? Error() : listen_at(place_.address, &listener_);
  if (!e.ok()) {
    const bool taken = e.code() == STRATA_ALREADY_EXISTS;
    return {e.code(), join(opening(place_), ": ", e.text(),
                           taken ? "; is another job running there? Its name, or option address, has to differ" : "")};
  }
  while (e.ok() && !missing().empty()) {
    e = step(deadline);
    if (e.ok() && deadline.passed() && !missing().empty()) {
      e = {STRATA_DEADLINE_EXCEEDED, join(opening(place_), ": waited ", deadline.text(), " at ", place_.address.text,
                                          ": ", missing(), " never came")};
    }
  }
  if (!e.ok()) {
    tell(message(Type::kFail, Failure{e.code()}, e.text()));
    return e;
  }
  std::string people;
  for (const Seat& seat : seats_) people.append(reinterpret_cast<const char*>(&seat.person), sizeof(Person));
  tell(message(Type::kStart, nullptr, 0, people));
  return {};
}

Error Reception::step(const Deadline& deadline) {
  std::vector<pollfd> polls = {{listener_.get(), POLLIN, 0}};
  for (const Caller& caller : callers_) polls.push_back({caller.socket.get(), POLLIN, 0});
  for (const Seat& seat : seats_) polls.push_back({seat.control.get(), POLLIN, 0});
  polls.push_back({place_.stop, POLLIN, 0});
  ::poll(polls.data(), polls.size(), deadline.poll_ms(kSliceMs));
  if (polls.back().revents) return {STRATA_CANCELLED, opening(place_) + ": the job it is a part of has failed"};
  accept_all();
  for (auto caller = callers_.begin(); caller != callers_.end();) {
    bool finished = false;
    if (Error e = listen_to(&*caller, &finished); !e.ok()) return e;
    caller = finished ? callers_.erase(caller) : std::next(caller);
  }
  return look_for_the_dead();
}

void Reception::accept_all() {
  for (;;) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;
    if (place_.address.local() && !same_user(socket.get())) continue;
    prepare(socket.get());
    callers_.push_back({std::move(socket), ""});
  }
}

Error Reception::listen_to(Caller* caller, bool* finished) {
  Hello hello;
  char bytes[sizeof(hello)];
  const ssize_t got = ::recv(caller->socket.get(), bytes, sizeof(hello) - caller->said.size(), MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return {};
  *finished = got <= 0;
  if (*finished) return {};
  caller->said.append(bytes, static_cast<size_t>(got));
  uint32_t magic = kMagic;
  std::memcpy(&magic, caller->said.data(), std::min(caller->said.size(), sizeof(magic)));
  *finished = magic != kMagic;
  if (*finished || caller->said.size() < sizeof(hello)) return {};
  *finished = true;
  std::memcpy(&hello, caller->said.data(), sizeof(hello));
  hello.job[sizeof(hello.job) - 1] = 0;
  hello.person.host[sizeof(hello.person.host) - 1] = 0;
  return place(caller, hello);
}

// Answers a guest that is not taken, and says why to the others too, unless it came to the wrong door.
Error Reception::refuse(int socket, Error why) {
  const std::string bytes = message(Type::kFail, Failure{why.code()}, why.text());
  (void)send_all(socket, bytes.data(), bytes.size(), Deadline::after(0), -1);
  return why;
}

Error Reception::place(Caller* caller, const Hello& hello) {
  const int socket = caller->socket.get();
  const std::string guest = name_of(hello.rank, hello.person);
  if (hello.job_hash != hash_of(place_.job)) {
    (void)refuse(socket,
                 {STRATA_FAILED_PRECONDITION, join(guest, " of job \"", hello.job, "\" came to rank 0 of job \"",
                                                   place_.job, "\" at ", place_.address.text)});
    return {};
  }
  auto wrong = [&](const std::string& why) {
    return refuse(socket, {STRATA_FAILED_PRECONDITION, join("job \"", place_.job, "\": ", guest, why)});
  };
  if (hello.version != kVersion || hello.post_bytes != sizeof(Announcement)) {
    return wrong(join(" runs another build (control channel ", hello.version, ", rank 0 has ", kVersion, ")"));
  }
  if (hello.world != place_.world) {
    return wrong(join(" says world ", hello.world, ", rank 0 says ", place_.world));
  }
  if (hello.rank < 1 || hello.rank >= place_.world) return wrong(" is no rank of this world");
  Seat& seat = seats_[static_cast<size_t>(hello.rank)];
  Fd& lane = hello.lane == 0 ? seat.control : seat.exchange;
  const bool another = seat.person.pid != 0 && std::memcmp(&seat.person, &hello.person, sizeof(Person)) != 0;
  if (lane || another) return wrong(join(" came, but ", name_of(hello.rank, seat.person), " is there already"));
  seat.person = hello.person;
  lane = std::move(caller->socket);
  tell(message(Type::kWaiting, nullptr, 0, missing()));
  return {};
}

Error Reception::look_for_the_dead() {
  for (size_t r = 1; r < seats_.size(); ++r) {
    char byte;
    if (!seats_[r].control) continue;
    if (::recv(seats_[r].control.get(), &byte, 1, MSG_DONTWAIT | MSG_PEEK) != 0) continue;
    return {STRATA_UNAVAILABLE,
            join(opening(place_), ": ", name_of(place_.number(static_cast<int>(r)), seats_[r].person),
                 " came and went before all were there")};
  }
  return {};
}

std::string Reception::missing() const {
  std::string out;
  for (size_t r = 1; r < seats_.size(); ++r) {
    if (seats_[r].control && seats_[r].exchange) continue;
    out += join(out.empty() ? "" : ", ", "rank ", place_.number(static_cast<int>(r)));
  }
  return out;
}

void Reception::tell(const std::string& bytes) {
  for (Seat& seat : seats_) {
    if (seat.control) (void)send_all(seat.control.get(), bytes.data(), bytes.size(), Deadline::after(100'000'000), -1);
  }
}

}  // namespace

Error meet_as_rank0(const Place& place, const Deadline& deadline, std::vector<Seat>* out) {
  Reception reception(place, out);
  return reception.run(deadline);
}

}  // namespace strata::control_channel
