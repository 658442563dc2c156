// nearest.h - "did you mean": the known word nearest to a mistyped one.
//
// Distance: insertions, deletions, replacements and swaps of neighbours, each 1 (optimal string alignment). A word is
// near when at most a third of the typed letters differ, so that short words do not match everything.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace strata {

inline size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), now(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    now[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = last[j - 1] + (a[i - 1] != b[j - 1]);
      now[j] = std::min({last[j] + 1, now[j - 1] + 1, replaced});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) now[j] = std::min(now[j], before[j - 2] + 1);
    }
    std::swap(before, last);
    std::swap(last, now);
  }
  return last[b.size()];
}

// Largest distance at which a word still counts as a typing error of `typed`.
inline size_t near_limit(std::string_view typed) { return std::max<size_t>(1, typed.size() / 3); }

// The nearest of `words` within near_limit, the first of equals; "" when none is near.
inline std::string nearest(std::string_view typed, const std::vector<std::string>& words) {
  if (typed.size() > 100) return {};  // nobody mistypes that; keeps hostile input cheap
  size_t best = near_limit(typed) + 1;
  std::string found;
  for (const std::string& word : words) {
    const size_t distance = edit_distance(typed, word);
    if (distance < best) {
      best = distance;
      found = word;
    }
  }
  return found;
}

}  // namespace strata
