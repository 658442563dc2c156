// handshake.h - the words and tools both ends of the meeting of processes use (meeting.h has the course of it).
//
// SOCK_SEQPACKET keeps messages whole. Only processes of the same user are spoken to. Descriptors travel in the
// messages and are closed on exec.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <string>
#include <vector>

#include "meeting.h"

namespace comm_local {

constexpr uint32_t kMagic = 0x53434c31;  // "SCL1": changes with Area and the messages
constexpr int kMaxFds = 2 * kMaxRanks;   // below the kernel's 253 per message

struct Hello {
  uint32_t magic;
  int32_t rank;
  int32_t world;
};

enum class Kind : uint32_t { kSeated = 1, kWelcome = 2, kRefused = 3 };

struct Reply {
  Kind kind;
  int32_t code;
  char text[1016];
};

bool send_message(int socket, const void* bytes, size_t size, const std::vector<int>& fds);
// Size of the message, 0 at the end of the connection, -1 with errno. Does not block.
ssize_t receive_message(int socket, void* bytes, size_t size, std::vector<Fd>* fds);
bool would_block();  // errno says: later

// The abstract name: user and job. A long job keeps its head and gets a hash, because a name has 107 bytes.
sockaddr_un address_of(const std::string& job, socklen_t* length);
ucred credentials(int socket);
Fd new_socket();

std::string opening(const Identity& id);  // what is being done, for errors
Error os_failure(const Identity& id, const std::string& call);

class ProcessMembership : public Membership {
 public:
  Mapping area;
  Fd name;  // rank 0: the bound socket, which keeps the job's name taken
};

// Maps the control area; `fresh`: makes it first. Gives `out` its board and takes the seat.
Error map_area(const Identity& id, int fd, bool fresh, ProcessMembership* member, Met* out);

// The two ends.
Error meet_as_rank0(const Identity& id, const Deadline& deadline, Met* out);
Error meet_as_guest(const Identity& id, const Deadline& deadline, Met* out);

}  // namespace comm_local
