// rules.h - the rules of a fault instance: which call of which slot does what.
//
// A rule is OP:N:KIND. OP names a slot, alone ("write") or with its interface ("offload.write"). N is the number of the
// call, from 1; "N+" means that call and all later ones, "*" all. KIND is fail, fail=CODE (a status name or number),
// short, late=MS, hold=GATE. Rules are separated by commas; where two match a call, the first in the list counts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "strata/abi.h"

namespace strata::fault {

enum class Kind { kFail, kShort, kLate, kHold };

struct Rule {
  std::string interface;  // "offload", or "" for any
  std::string op;
  uint64_t first = 1, last = UINT64_MAX;
  Kind kind = Kind::kFail;
  strata_status code = STRATA_INTERNAL;  // kFail
  int64_t late_ms = 0;                   // kLate
  std::string gate;                      // kHold
  std::string text;                      // as written, for errors
};

// One slot of an interface, and which kinds make sense for it.
struct Op {
  const char* name;
  bool returns_status;  // so it can fail; others can only be late or held
  bool moves_bytes;     // so it can be short
};

struct Interface {
  const char* id;    // "strata.offload/1"
  const char* name;  // "offload"
  std::vector<Op> ops;
};

// All wrapped interfaces; rules are checked against them.
const std::vector<const Interface*>& all_interfaces();

// False, with the reason in `error`, when `text` is not a list of rules for slots that exist and can do that.
bool parse_rules(const std::string& text, std::vector<Rule>* out, std::string* error);

}  // namespace strata::fault
