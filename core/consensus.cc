#include "core/consensus.h"

#include <algorithm>
#include <cstring>

#include "core/hash.h"
#include "core/manifest/toml_doc.h"

namespace strata {

namespace {
// What others hear of an error. printable() goes a little beyond its limit.
struct Cause {
  static constexpr size_t kBytes = 1024, kLimit = 990;
  char text[kBytes];
};
}  // namespace

Status Consensus::gather(Among among, uint64_t value, const std::string& what, std::vector<uint64_t>* all) const {
  all->resize(static_cast<size_t>(axis(among).size));
  return exchange_(among, what, &value, all->data(), sizeof(value));
}

// "rank 1, 3" for the ranks whose value is not `expected`; "" when there is none.
std::string Consensus::others_than(Among among, const std::vector<uint64_t>& values, uint64_t expected) const {
  const auto same = static_cast<size_t>(std::count(values.begin(), values.end(), expected));
  if (same == 0) return "all " + std::to_string(values.size()) + " ranks";
  std::string text;
  for (int r = 0; r < axis(among).size; ++r) {
    if (values[static_cast<size_t>(r)] == expected) continue;
    text += (text.empty() ? "rank " : ", ") + std::to_string(number(among, r));
  }
  return text;
}

// All ranks see the same hashes, so all of them go on to find the value that differs.
Status Consensus::same(Among among, const std::vector<Value>& values, const std::string& what) const {
  uint64_t hash = fnv1a(nullptr, 0);
  for (const auto& [name, value] : values) hash = fnv1a(&value, sizeof(value), hash);
  std::vector<uint64_t> all;
  STRATA_RETURN_IF_ERROR(gather(among, hash, what, &all));
  if (others_than(among, all, all[0]).empty()) return Ok();
  for (const auto& [name, value] : values) {
    STRATA_RETURN_IF_ERROR(gather(among, value, what, &all));
    const std::string differ = others_than(among, all, all[0]);
    if (differ.empty()) continue;
    return {STRATA_FAILED_PRECONDITION,
            name + ": " + differ + " differs from rank " + std::to_string(number(among, 0))};
  }
  return {STRATA_INTERNAL, "ranks differ in a value that is the same everywhere"};
}

Status Consensus::take_from_rank0(const std::string& what, uint64_t* value) const {
  std::vector<uint64_t> all;
  STRATA_RETURN_IF_ERROR(gather(Among::kEveryone, *value, what, &all));
  *value = all[0];
  return Ok();
}

// The causes of all ranks, as much of them as others hear.
Status Consensus::hear(Among among, const std::string& mine, const std::string& what,
                       std::vector<std::string>* all) const {
  Cause own{};
  mine.copy(own.text, Cause::kBytes - 1);
  std::vector<Cause> causes(static_cast<size_t>(axis(among).size));
  STRATA_RETURN_IF_ERROR(exchange_(among, what, &own, causes.data(), sizeof(own)));
  for (const Cause& cause : causes) all->emplace_back(cause.text, strnlen(cause.text, Cause::kBytes));
  return Ok();
}

// An error of this rank's own is never lost, not even where the others cannot hear of it.
Status Consensus::all_ok(Among among, const Status& mine, const std::string& what) const {
  const auto unheard = [&](const Status& why) {
    return mine.ok() ? why
                     : Status(mine.code(), what + ": " + mine.text() + "; the others were not told: " + why.text());
  };
  std::vector<uint64_t> codes;
  if (const Status s = gather(among, static_cast<uint64_t>(mine.code()), what, &codes); !s.ok()) return unheard(s);
  const auto failed = std::find_if(codes.begin(), codes.end(), [](uint64_t code) { return code != STRATA_OK; });
  if (failed == codes.end() || codes.size() == 1) return mine.during(what);
  const std::string who = what + ": it failed on " + others_than(among, codes, STRATA_OK);
  const std::string shown = printable(mine.text(), Cause::kLimit);
  std::vector<std::string> causes;
  if (const Status s = hear(among, shown, what, &causes); !s.ok()) return unheard(s.during(who));
  const auto first = static_cast<size_t>(failed - codes.begin());
  const bool is_mine = first == static_cast<size_t>(axis(among).rank);
  const std::string here = mine.ok() || is_mine || shown == causes[first] ? "" : "; here: " + mine.text();
  return {static_cast<strata_status>(*failed), who + ": " + (is_mine ? mine.text() : causes[first]) + here};
}

}  // namespace strata
