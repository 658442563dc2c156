// socket.h - addresses of rank 0, and sending and receiving on sockets with a deadline.
//
// Rank 0 is found by "host:port" over TCP, or by the name of the job through an abstract socket of this machine, which
// needs no port, leaves no file, and is seen by processes of the same user only. Past the address both are the same.
#pragma once

#include <sys/socket.h>

#include <string>

#include "io/fd.h"
#include "plugin_kit/deadline.h"
#include "plugin_kit/error.h"

namespace strata::control_channel {

using io::Fd;
using plugin_kit::Deadline;
using plugin_kit::Error;

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;
  std::string text;  // for errors

  bool local() const { return storage.ss_family == AF_UNIX; }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// The socket of job `job` on this machine; `kind` keeps plugins apart.
Address local_address(const std::string& kind, const std::string& job);
// "node7:29700", "10.0.0.7:29700", "[fe80::1]:29700".
Error resolve(const std::string& host_and_port, Address* out);

Error listen_at(const Address& address, Fd* out);
// At an address of this machine that nobody has: as the ranks at the other end of `socket` can reach it.
Error listen_beside(int socket, Fd* out, Address* address);
// One attempt, at most `ms` long. NOT_FOUND: nobody listens there (yet).
Error connect_to(const Address& address, int ms, Fd* out);
// A socket of `accept` or `connect_to`, ready for small messages in both directions.
void prepare(int socket);
// Over a local socket, false when the other end belongs to another user.
bool same_user(int socket);

enum class Outcome { kDone, kClosed, kLate, kStopped };
// Move all bytes. `stop` is a descriptor that becomes readable when nobody shall wait any longer. `spin`: try again for
// a moment before sleeping; for answers that come in microseconds.
Outcome send_all(int socket, const void* data, size_t bytes, const Deadline& deadline, int stop);
Outcome receive_all(int socket, void* data, size_t bytes, const Deadline& deadline, int stop, bool spin);

}  // namespace strata::control_channel
