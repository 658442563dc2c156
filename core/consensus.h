// consensus.h - what ranks find out together about a call that all of them make: whether it went well everywhere, and
// whether a value is the same everywhere.
//
// While all is well a question is one exchange of a number. What is wrong takes more, and since every rank sees the
// same numbers, all of them go on to it. Where a call failed on some ranks, all end it with one code, the first one's,
// and hear who they are and what the first of them said, shortened and printable.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/places.h"

namespace strata {

// The ranks of this data-parallel group, or of the world.
enum class Among { kGroup, kEveryone };

class Consensus {
 public:
  // Brings every rank's `bytes` to all, in rank order. `what` is the same on all of them.
  using Exchange = std::function<Status(Among, const std::string& what, const void* mine, void* all, uint64_t bytes)>;
  Consensus(const Places& places, Exchange exchange) : places_(places), exchange_(std::move(exchange)) {}

  // A number all ranks must have equal, and what it is.
  using Value = std::pair<std::string, uint64_t>;
  // Compares values; the error names the first that differs and the ranks that differ from the first rank.
  Status same(Among among, const std::vector<Value>& values, const std::string& what) const;
  // Gives every rank of the world rank 0's number.
  Status take_from_rank0(const std::string& what, uint64_t* value) const;
  // Ends what all ranks did alike, `what`: OK when it was OK on every rank.
  Status all_ok(Among among, const Status& mine, const std::string& what) const;

 private:
  Axis axis(Among among) const { return among == Among::kEveryone ? places_.world : places_.data; }
  int number(Among among, int rank) const { return among == Among::kEveryone ? rank : places_.in_group(rank); }
  Status gather(Among among, uint64_t value, const std::string& what, std::vector<uint64_t>* all) const;
  Status hear(Among among, const std::string& mine, const std::string& what, std::vector<std::string>* all) const;
  std::string others_than(Among among, const std::vector<uint64_t>& values, uint64_t expected) const;

  const Places& places_;
  const Exchange exchange_;
};

}  // namespace strata
