// Rank 0's end of the meeting of processes: it binds the job's name, seats the ranks as they come, and welcomes them
// all when the last one is there. Whatever goes wrong is told to every rank that has come, in the same words.
#include <poll.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "handshake.h"

namespace comm_local {
namespace {

Reply refusal(const Error& e) {
  Reply reply = {Kind::kRefused, e.code(), {}};
  std::strncpy(reply.text, e.text().c_str(), sizeof(reply.text) - 1);
  return reply;
}

Fd open_pidfd(int pid) { return Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))); }

class Registrar {
 public:
  Registrar(const Identity& id, const Deadline& deadline, Met* out)
      : id_(id),
        deadline_(deadline),
        out_(out),
        seated_(static_cast<size_t>(id.world)),
        files_(static_cast<size_t>(id.world)),
        pidfds_(static_cast<size_t>(id.world)) {}
  Error run();

 private:
  struct Guest {
    Fd socket;
    int rank = -1;  // until it has said hello
    int pid = 0;
  };
  Error bind_name();
  Error already_running() const;
  Error wait_for_all();
  void admit();
  Error hear(Guest* guest);
  Error seat(Guest* guest, const Hello& hello, std::vector<Fd> fds);
  Error lost(const Guest& guest) const;
  Error nobody_missing() const;
  Error welcome();
  bool complete() const;

  const Identity& id_;
  const Deadline& deadline_;
  Met* out_;
  Fd listener_, area_fd_;
  std::vector<Guest> guests_;
  std::vector<bool> seated_;
  std::vector<Fd> files_, pidfds_;
};

bool Registrar::complete() const {
  for (bool here : seated_) {
    if (!here) return false;
  }
  return true;
}

Error Registrar::already_running() const {
  socklen_t length;
  const sockaddr_un address = address_of(id_.job, &length);
  Fd probe = new_socket();
  std::string holder;
  if (probe && ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0) {
    holder = ": process " + std::to_string(credentials(probe.get()).pid) + " is its rank 0";
  }
  return {STRATA_ALREADY_EXISTS, opening(id_) + ": a job of that name is running on this machine" + holder};
}

// A rank 0 that was just killed may hold its name for a moment while the kernel ends it, hence the second of retries.
Error Registrar::bind_name() {
  listener_ = new_socket();
  if (!listener_) return os_failure(id_, "socket");
  socklen_t length;
  const sockaddr_un address = address_of(id_.job, &length);
  const Deadline retry = Deadline::after(1'000'000'000);
  while (::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno != EADDRINUSE) return os_failure(id_, "bind");
    if (retry.passed() || deadline_.passed()) return already_running();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (::listen(listener_.get(), 4 * kMaxRanks) != 0) return os_failure(id_, "listen");
  return {};
}

void Registrar::admit() {
  for (;;) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) return;
    const ucred peer = credentials(socket.get());
    if (peer.uid == ::geteuid()) guests_.push_back({std::move(socket), -1, peer.pid});
  }
}

Error Registrar::lost(const Guest& guest) const {
  // A rank that gave up has left its reason on the board.
  if (Error e = out_->board->failure(); !e.ok()) return e;
  const std::string who = guest.rank < 0 ? "a rank" : "rank " + std::to_string(guest.rank);
  return {STRATA_UNAVAILABLE,
          opening(id_) + ": " + who + " (pid " + std::to_string(guest.pid) + ") died before all ranks had come"};
}

Error Registrar::hear(Guest* guest) {
  Hello hello = {};
  std::vector<Fd> fds;
  const ssize_t got = receive_message(guest->socket.get(), &hello, sizeof(hello), &fds);
  if (got < 0 && would_block()) return {};
  if (got <= 0) return lost(*guest);
  if (guest->rank >= 0) return {};  // a seated guest has nothing more to say
  if (got != sizeof(hello) || hello.magic != kMagic || fds.size() != 1) {
    return {STRATA_FAILED_PRECONDITION,
            opening(id_) + ": process " + std::to_string(guest->pid) + " speaks another version of comm_local"};
  }
  return seat(guest, hello, std::move(fds));
}

Error Registrar::seat(Guest* guest, const Hello& hello, std::vector<Fd> fds) {
  const std::string caller =
      opening(id_) + ": process " + std::to_string(guest->pid) + " came as rank " + std::to_string(hello.rank);
  if (hello.world != id_.world) {
    return {STRATA_INVALID_ARGUMENT, caller + " of world " + std::to_string(hello.world)};
  }
  const auto r = static_cast<size_t>(hello.rank);
  if (hello.rank <= 0 || hello.rank >= id_.world || seated_[r]) {
    return {STRATA_ALREADY_EXISTS, caller + ", which " + out_->board->who(hello.rank) + " is already"};
  }
  pidfds_[r] = open_pidfd(guest->pid);
  files_[r] = std::move(fds[0]);
  guest->rank = hello.rank;
  seated_[r] = true;
  const Reply reply = {Kind::kSeated, STRATA_OK, {}};
  // If the send fails the guest is gone, and the next poll says so by the end of its connection.
  (void)send_message(guest->socket.get(), &reply, sizeof(reply), {area_fd_.get()});
  return {};
}

Error Registrar::nobody_missing() const {
  if (out_->whole) {
    if (Error e = out_->whole->look(opening(id_)); !e.ok()) return e;
  }
  if (!deadline_.passed()) return {};
  std::string names;
  for (int r = 0; r < id_.world; ++r) {
    if (!seated_[static_cast<size_t>(r)]) names += (names.empty() ? "" : ", ") + std::to_string(out_->board->number(r));
  }
  return {STRATA_DEADLINE_EXCEEDED, opening(id_) + ": waited " + deadline_.text() + "; rank " + names + " never came"};
}

Error Registrar::wait_for_all() {
  while (!complete()) {
    if (Error e = nobody_missing(); !e.ok()) return e;
    std::vector<pollfd> polls = {{listener_.get(), POLLIN, 0}};
    for (const Guest& guest : guests_) polls.push_back({guest.socket.get(), POLLIN, 0});
    if (::poll(polls.data(), polls.size(), deadline_.poll_ms(100)) <= 0) continue;
    for (size_t i = 1; i < polls.size(); ++i) {
      if (polls[i].revents == 0) continue;
      if (Error e = hear(&guests_[i - 1]); !e.ok()) return e;
    }
    if (polls[0].revents) admit();
  }
  return {};
}

Error Registrar::welcome() {
  std::vector<int> fds;
  for (const Fd& file : files_) fds.push_back(file.get());
  for (const Fd& pidfd : pidfds_) {
    // A kernel without pidfds (before 5.3) cannot tell a dead rank from a late one; that is refused, not hidden.
    if (!pidfd) return os_failure(id_, "pidfd_open");
    fds.push_back(pidfd.get());
  }
  const Reply reply = {Kind::kWelcome, STRATA_OK, {}};
  for (const Guest& guest : guests_) {
    if (guest.rank < 0) continue;
    if (!send_message(guest.socket.get(), &reply, sizeof(reply), fds)) return lost(guest);
  }
  return {};
}

Error Registrar::run() {
  auto member = std::make_unique<ProcessMembership>();
  Error e = bind_name();
  if (e.ok()) e = create_memfd("control", &area_fd_);
  if (e.ok()) e = create_memfd("rank 0", &files_[0]);
  if (e.ok()) e = map_area(id_, area_fd_.get(), true, member.get(), out_);
  if (!e.ok()) return e;
  seated_[0] = true;
  pidfds_[0] = open_pidfd(::getpid());
  e = wait_for_all();
  if (e.ok()) e = welcome();
  member->name = std::move(listener_);
  out_->membership = std::move(member);
  if (!e.ok()) {
    e = out_->board->fail(e);
    const Reply reply = refusal(e);
    for (const Guest& guest : guests_) (void)send_message(guest.socket.get(), &reply, sizeof(reply), {});
    return e;
  }
  out_->memory = Memory(std::move(files_), 0);
  out_->board->watch(std::move(pidfds_));
  return {};
}

}  // namespace

Error meet_as_rank0(const Identity& id, const Deadline& deadline, Met* out) {
  return Registrar(id, deadline, out).run();
}

}  // namespace comm_local
