// The other ranks' end of the meeting of processes: reach rank 0, say hello, wait for the welcome. Until rank 0 is
// there the connection is tried again and again; once seated, the end of the connection means that rank 0 has died.
#include <poll.h>

#include <cerrno>
#include <cstring>
#include <iterator>
#include <thread>

#include "handshake.h"

namespace comm_local {
namespace {

class Newcomer {
 public:
  Newcomer(const Identity& id, const Deadline& deadline, Met* out) : id_(id), deadline_(deadline), out_(out) {}
  Error run();

 private:
  Error connect_once(bool* connected);
  Error wait_for(Kind kind, std::vector<Fd>* fds, bool* closed);
  Error keep_waiting() const;
  Error gave_up() const;

  const Identity& id_;
  const Deadline& deadline_;
  Met* out_;
  Fd socket_, file_;
};

// One try to reach rank 0 and say hello.
Error Newcomer::connect_once(bool* connected) {
  *connected = false;
  socket_ = new_socket();
  if (!socket_) return os_failure(id_, "socket");
  socklen_t length;
  const sockaddr_un address = address_of(id_.job, &length);
  if (::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno == ECONNREFUSED || errno == ENOENT || would_block()) return {};
    return os_failure(id_, "connect");
  }
  const ucred peer = credentials(socket_.get());
  if (peer.uid != ::geteuid()) {
    return {STRATA_PERMISSION_DENIED, opening(id_) + ": the job's name is taken by process " +
                                          std::to_string(peer.pid) + " of user " + std::to_string(peer.uid)};
  }
  const Hello hello = {kMagic, id_.rank, id_.world};
  *connected = send_message(socket_.get(), &hello, sizeof(hello), {file_.get()});
  return {};
}

Error Newcomer::wait_for(Kind kind, std::vector<Fd>* fds, bool* closed) {
  *closed = false;
  for (;;) {
    pollfd one = {socket_.get(), POLLIN, 0};
    if (::poll(&one, 1, deadline_.poll_ms(100)) > 0) {
      Reply reply = {};
      const ssize_t got = receive_message(socket_.get(), &reply, sizeof(reply), fds);
      if (got == 0) {
        *closed = true;
        return {};
      }
      if (got < 0 && !would_block()) return os_failure(id_, "recvmsg");
      if (got > 0 && reply.kind == Kind::kRefused) return {reply.code, reply.text};
      if (got > 0 && reply.kind == kind) return {};
    }
    if (Error e = keep_waiting(); !e.ok()) return e;
  }
}

Error Newcomer::keep_waiting() const {
  if (out_->whole) {
    if (Error e = out_->whole->look(opening(id_)); !e.ok()) return e;
  }
  return deadline_.passed() ? gave_up() : Error();
}

Error Newcomer::gave_up() const {
  const std::string what = opening(id_) + ": waited " + deadline_.text() + "; ";
  if (!out_->board) {
    const int pid = socket_ ? credentials(socket_.get()).pid : 0;
    if (pid == 0) return {STRATA_DEADLINE_EXCEEDED, what + "rank 0 never came"};
    return {STRATA_DEADLINE_EXCEEDED, what + "rank 0 (pid " + std::to_string(pid) +
                                          ") does not answer: it is stopped, or a job of that name is already running"};
  }
  std::string names;
  for (int r = 0; r < id_.world; ++r) {
    if (!out_->board->has_come(r)) names += (names.empty() ? "" : ", ") + std::to_string(out_->board->number(r));
  }
  return {STRATA_DEADLINE_EXCEEDED,
          names.empty() ? what + "rank 0 did not send the welcome" : what + "rank " + names + " never came"};
}

Error Newcomer::run() {
  if (Error e = create_memfd("rank " + std::to_string(id_.rank), &file_); !e.ok()) return e;
  std::vector<Fd> fds;
  for (bool seated = false; !seated;) {
    bool connected = false;
    bool closed = false;
    if (Error e = connect_once(&connected); !e.ok()) return e;
    if (connected) {
      if (Error e = wait_for(Kind::kSeated, &fds, &closed); !e.ok()) return e;
      seated = !closed && fds.size() == 1;
    }
    if (seated) break;
    // Nobody there yet, or a rank 0 of before that is just leaving.
    socket_ = Fd();
    if (Error e = keep_waiting(); !e.ok()) return e;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  auto member = std::make_unique<ProcessMembership>();
  if (Error e = map_area(id_, fds[0].get(), false, member.get(), out_); !e.ok()) return e;
  out_->membership = std::move(member);
  fds.clear();
  bool closed = false;
  Error e = wait_for(Kind::kWelcome, &fds, &closed);
  if (e.ok() && closed) e = out_->board->failure();
  if (e.ok() && closed) {
    e = {STRATA_UNAVAILABLE, opening(id_) + ": " + out_->board->who(0) + " died before all ranks had come"};
  } else if (e.ok() && fds.size() != static_cast<size_t>(2 * id_.world)) {
    e = {STRATA_RESOURCE_EXHAUSTED, opening(id_) + ": only " + std::to_string(fds.size()) + " of " +
                                        std::to_string(2 * id_.world) +
                                        " descriptors fit into this process (ulimit -n)"};
  }
  if (!e.ok()) return out_->board->fail(e);
  std::vector<Fd> pidfds(std::make_move_iterator(fds.begin() + id_.world), std::make_move_iterator(fds.end()));
  fds.resize(static_cast<size_t>(id_.world));
  out_->memory = Memory(std::move(fds), id_.rank);
  out_->board->watch(std::move(pidfds));
  return {};
}

}  // namespace

Error meet_as_guest(const Identity& id, const Deadline& deadline, Met* out) {
  return Newcomer(id, deadline, out).run();
}

}  // namespace comm_local
