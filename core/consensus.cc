#include "core/consensus.h"

#include <algorithm>
#include <cstring>

#include "core/hash.h"
#include "core/manifest/toml_doc.h"

namespace strata {

namespace {
// What others hear of an error: its beginning, where it happened, and its end, where a long one says why.
struct Cause {
  static constexpr size_t kBytes = 1024, kBegin = 700, kEnd = 300;
  char text[kBytes];
};

std::string shortened(std::string text) {
  for (size_t at = 0; (at = text.find('\n', at)) != std::string::npos;) text.replace(at, 1, "; ");
  const std::string whole = printable(text, 4 * text.size());
  if (whole.size() < Cause::kBytes) return whole;
  const auto inside = [&whole](size_t at) { return (static_cast<unsigned char>(whole[at]) & 0xC0) == 0x80; };  // UTF-8
  size_t begin = Cause::kBegin, end = whole.size() - Cause::kEnd;
  while (inside(begin)) --begin;
  while (inside(end)) ++end;
  return whole.substr(0, begin) + " ... " + whole.substr(end);
}
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
    return {STRATA_FAILED_PRECONDITION, name + ": " + differ + " differs from rank " +
                                            std::to_string(number(among, 0)) + "; all ranks need the same"};
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
  const auto unheard = [&](strata_status code, const Status& why) {
    return Status(code,
                  mine.ok() ? why.text() : what + ": " + mine.text() + "; the others were not told: " + why.text());
  };
  std::vector<uint64_t> codes;
  if (const Status s = gather(among, static_cast<uint64_t>(mine.code()), what, &codes); !s.ok()) {
    return unheard(mine.ok() ? s.code() : mine.code(), s);
  }
  const auto failed = std::find_if(codes.begin(), codes.end(), [](uint64_t code) { return code != STRATA_OK; });
  if (failed == codes.end() || codes.size() == 1) return mine.during(what);
  const auto code = static_cast<strata_status>(*failed);
  const std::string who = what + ": it failed on " + others_than(among, codes, STRATA_OK);
  const std::string shown = shortened(mine.text());
  std::vector<std::string> causes;
  if (const Status s = hear(among, shown, what, &causes); !s.ok()) return unheard(code, s.during(who));
  const auto first = static_cast<size_t>(failed - codes.begin());
  const bool is_mine = first == static_cast<size_t>(axis(among).rank);
  const std::string here = mine.ok() || is_mine || shown == causes[first] ? "" : "; here: " + mine.text();
  return {code, who + ": " + (is_mine ? mine.text() : causes[first]) + here};
}

}  // namespace strata
