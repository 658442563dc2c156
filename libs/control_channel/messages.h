// messages.h - what goes over the control lanes, as bytes: a Header and then its payload.
//
// Structures are sent as they lie in memory: ranks run one build on one kind of machine, and the hello proves it.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "collective_kit/post.h"
#include "strata/abi.h"

namespace strata::control_channel {

using Post = collective_kit::ShownPost;

constexpr uint32_t kMagic = 0x53545243u;
constexpr uint32_t kVersion = 1;

enum class Type : uint32_t {
  kWaiting = 1,  // rank 0, while not all have come: text of who is missing
  kStart,        // rank 0: all have come; Person of every rank
  kPost,         // guest: Announcement
  kBeat,         // both: still here
  kFail,         // both: Failure, then its text
  kBye           // both: Goodbye; nothing comes after it
};

struct Header {
  Type type;
  uint32_t bytes;
};

struct Person {
  uint32_t pid;
  char host[60];
};

// Opens both lanes of a guest.
struct Hello {
  uint32_t magic;
  uint32_t version;
  uint32_t post_bytes;
  uint32_t lane;  // 0 control, 1 exchange
  int32_t rank;
  int32_t world;
  Person person;
  uint64_t job_hash;
  char job[96];
};

struct Announcement {
  Post post;
  int64_t deadline_ns;
};

struct Failure {
  strata_status code;
};

struct Goodbye {
  uint64_t calls;  // collectives it began
};

inline std::string message(Type type, const void* payload = nullptr, size_t bytes = 0, const std::string& text = "") {
  const Header header = {type, static_cast<uint32_t>(bytes + text.size())};
  std::string out(reinterpret_cast<const char*>(&header), sizeof(header));
  if (bytes > 0) out.append(static_cast<const char*>(payload), bytes);
  return out + text;
}

template <class T>
std::string message(Type type, const T& payload, const std::string& text = "") {
  return message(type, &payload, sizeof(payload), text);
}

// The payload as a T, zeros where it is short.
template <class T>
T payload_as(const std::string& payload) {
  T out{};
  std::memcpy(&out, payload.data(), payload.size() < sizeof(out) ? payload.size() : sizeof(out));
  return out;
}

// Takes the first whole message off the front of `inbox`; false when there is none.
inline bool take_message(std::string* inbox, Type* type, std::string* payload) {
  if (inbox->size() < sizeof(Header)) return false;
  Header header;
  std::memcpy(&header, inbox->data(), sizeof(header));
  if (inbox->size() - sizeof(header) < header.bytes) return false;
  *type = header.type;
  payload->assign(*inbox, sizeof(header), header.bytes);
  inbox->erase(0, sizeof(header) + header.bytes);
  return true;
}

}  // namespace strata::control_channel
