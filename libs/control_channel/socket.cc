#include "control_channel/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>

namespace strata::control_channel {
namespace {

using plugin_kit::join;

constexpr int64_t kSpinNs = 60'000;
constexpr int kSliceMs = 100;

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

Error os_error(strata_status code, const std::string& what) { return {code, what + ": " + std::strerror(errno)}; }

Fd new_socket(int family) { return Fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

// Waits until `socket` has `events`; false when it is late or stopped.
bool wait_for(int socket, short events, const Deadline& deadline, int stop, Outcome* why) {
  pollfd both[] = {{socket, events, 0}, {stop, POLLIN, 0}};
  for (;;) {
    const int ready = ::poll(both, stop >= 0 ? 2 : 1, deadline.poll_ms(kSliceMs));
    if (ready > 0 && both[0].revents) return true;  // what has come is worth more than the end
    if (ready > 0) {
      *why = Outcome::kStopped;
      return false;
    }
    if (deadline.passed()) {
      *why = Outcome::kLate;
      return false;
    }
  }
}

}  // namespace

Address local_address(const std::string& kind, const std::string& job) {
  uint64_t hash = 14695981039346656037u;
  for (char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  std::string name = join("strata.", kind, ".", ::geteuid(), ".");
  name += job.size() <= 60 ? job : join(job.substr(0, 40), "~", hash);
  Address address;
  address.text = join("the socket of job \"", job, "\" on this machine");
  auto* local = reinterpret_cast<sockaddr_un*>(&address.storage);
  local->sun_family = AF_UNIX;
  std::memcpy(local->sun_path + 1, name.data(), name.size());
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Error resolve(const std::string& host_and_port, Address* out) {
  const size_t colon = host_and_port.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == host_and_port.size()) {
    return {STRATA_INVALID_ARGUMENT, join("address \"", host_and_port, "\": it must be HOST:PORT")};
  }
  std::string host = host_and_port.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(host.c_str(), host_and_port.c_str() + colon + 1, &hints, &found);
  if (code != 0) return {STRATA_NOT_FOUND, join("address \"", host_and_port, "\": ", ::gai_strerror(code))};
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
  std::memcpy(&out->storage, found->ai_addr, found->ai_addrlen);
  out->length = found->ai_addrlen;
  out->text = host_and_port;
  return {};
}

Error listen_at(const Address& address, Fd* out) {
  Fd socket = new_socket(address.storage.ss_family);
  const int on = 1;
  if (!address.local()) ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (!socket || ::bind(socket.get(), address.get(), address.length) != 0 || ::listen(socket.get(), 1024) != 0) {
    const bool taken = errno == EADDRINUSE;
    return os_error(taken ? STRATA_ALREADY_EXISTS : STRATA_INTERNAL, "listening at " + address.text);
  }
  *out = std::move(socket);
  return {};
}

// A local socket gets its name from the kernel, one of TCP its port.
Error listen_beside(int socket, Fd* out, Address* address) {
  address->length = sizeof(address->storage);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&address->storage), &address->length) != 0) {
    return os_error(STRATA_INTERNAL, "asking for the address of a connection");
  }
  if (address->local()) address->length = sizeof(sa_family_t);
  if (address->storage.ss_family == AF_INET) reinterpret_cast<sockaddr_in*>(&address->storage)->sin_port = 0;
  if (address->storage.ss_family == AF_INET6) reinterpret_cast<sockaddr_in6*>(&address->storage)->sin6_port = 0;
  address->text = "a new address";
  if (Error e = listen_at(*address, out); !e.ok()) return e;
  address->length = sizeof(address->storage);
  if (::getsockname(out->get(), reinterpret_cast<sockaddr*>(&address->storage), &address->length) != 0) {
    return os_error(STRATA_INTERNAL, "asking for the address of a listening socket");
  }
  return {};
}

Error connect_to(const Address& address, int ms, Fd* out) {
  const std::string what = "connecting to " + address.text;
  Fd socket = new_socket(address.storage.ss_family);
  if (!socket) return os_error(STRATA_INTERNAL, what);
  if (::connect(socket.get(), address.get(), address.length) != 0) {
    if (errno != EINPROGRESS) return os_error(STRATA_NOT_FOUND, what);
    pollfd one = {socket.get(), POLLOUT, 0};
    if (::poll(&one, 1, ms) <= 0) return {STRATA_NOT_FOUND, what + ": no answer"};
    socklen_t size = sizeof(errno);
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &errno, &size);
    if (errno != 0) return os_error(STRATA_NOT_FOUND, what);
  }
  prepare(socket.get());
  *out = std::move(socket);
  return {};
}

void prepare(int socket) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));  // a local socket has no such delay
}

bool same_user(int socket) {
  ucred who{};
  socklen_t size = sizeof(who);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &size) == 0 && who.uid == ::geteuid();
}

Outcome send_all(int socket, const void* data, size_t bytes, const Deadline& deadline, int stop) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(socket, from, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      from += sent;
      bytes -= static_cast<size_t>(sent);
      continue;
    }
    if (!would_block()) return Outcome::kClosed;
    Outcome why;
    if (!wait_for(socket, POLLOUT, deadline, stop, &why)) return why;
  }
  return Outcome::kDone;
}

Outcome receive_all(int socket, void* data, size_t bytes, const Deadline& deadline, int stop, bool spin) {
  char* to = static_cast<char*>(data);
  Deadline end_of_spin = Deadline::after(spin ? kSpinNs : 0);
  while (bytes > 0) {
    const ssize_t got = ::recv(socket, to, bytes, MSG_DONTWAIT);
    if (got > 0) {
      to += got;
      bytes -= static_cast<size_t>(got);
      continue;
    }
    if (got == 0 || !would_block()) return Outcome::kClosed;
    if (!end_of_spin.passed()) continue;
    Outcome why;
    if (!wait_for(socket, POLLIN, deadline, stop, &why)) return why;
  }
  return Outcome::kDone;
}

}  // namespace strata::control_channel
