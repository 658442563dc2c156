#include "handshake.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <new>

namespace comm_local {

// ---- messages with descriptors ----

bool send_message(int socket, const void* bytes, size_t size, const std::vector<int>& fds) {
  iovec iov = {const_cast<void*>(bytes), size};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)] = {};
  msghdr message = {};
  message.msg_iov = &iov;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(header), fds.data(), sizeof(int) * fds.size());
  }
  return ::sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(size);
}

ssize_t receive_message(int socket, void* bytes, size_t size, std::vector<Fd>* fds) {
  iovec iov = {bytes, size};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * kMaxFds)];
  msghdr message = {};
  message.msg_iov = &iov;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got < 0) return errno == ECONNRESET ? 0 : got;
  for (cmsghdr* h = CMSG_FIRSTHDR(&message); h; h = CMSG_NXTHDR(&message, h)) {
    if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(h) + i * sizeof(int), sizeof(int));
      fds->emplace_back(fd);
    }
  }
  return got;
}

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

// ---- names and processes ----

sockaddr_un address_of(const std::string& job, socklen_t* length) {
  uint64_t hash = 14695981039346656037u;
  for (char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  std::string name = "strata.comm_local." + std::to_string(::geteuid()) + ".";
  name += job.size() <= 60 ? job : job.substr(0, 40) + "~" + std::to_string(hash);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

ucred credentials(int socket) {
  ucred who = {};
  socklen_t size = sizeof(who);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0) who.uid = static_cast<uid_t>(-1);
  return who;
}

Fd new_socket() { return Fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

std::string opening(const Identity& id) {
  return "opening rank " + std::to_string(id.rank) + " of job \"" + id.job + "\" (world " + std::to_string(id.world) +
         ")";
}

Error os_failure(const Identity& id, const std::string& call) {
  return {STRATA_INTERNAL, opening(id) + ": " + call + ": " + std::strerror(errno)};
}

Error map_area(const Identity& id, int fd, bool fresh, ProcessMembership* member, Met* out) {
  if (fresh && ::ftruncate(fd, sizeof(Area)) != 0) return os_failure(id, "ftruncate");
  void* base = ::mmap(nullptr, sizeof(Area), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return os_failure(id, "mmap of the control area");
  member->area = Mapping(base, sizeof(Area));
  Area* area = fresh ? new (base) Area() : static_cast<Area*>(base);
  out->take_board(area, id);
  return {};
}

Error meet_processes(const Identity& id, const Deadline& deadline, Met* out) {
  return id.rank == 0 ? meet_as_rank0(id, deadline, out) : meet_as_guest(id, deadline, out);
}

}  // namespace comm_local
