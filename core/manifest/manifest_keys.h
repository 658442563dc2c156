// manifest_keys.h - the one table of manifest keys: name, type, default, range, meaning.
//
// The parser (manifest.cc), the commented reference manifest and the table in the documentation
// (tools/manifest_docs.cc) are all made from it, so they cannot disagree. To add a key: a field in settings.h and a row
// in manifest_keys.cc; a rule that involves other keys goes to manifest_rules.cc. [plugin.NAME] sections are not here:
// each plugin's TOML declares its own.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/manifest/settings.h"
#include "core/status.h"

namespace strata {

// A word that stands for a number (an enum).
struct ChoiceField {
  void (*set)(Settings&, int32_t);
  int32_t (*get)(const Settings&);
};

// Where a row's value lies. A choice is a ChoiceField, or a text that is kept as the word itself.
using KeyTarget =
    std::variant<bool& (*)(Settings&), int64_t& (*)(Settings&), double& (*)(Settings&), std::string& (*)(Settings&),
                 std::array<double, 2>& (*)(Settings&), std::vector<std::string>& (*)(Settings&), ChoiceField>;

struct KeyChoice {
  const char* word;
  int32_t number;
};

// Closed at both ends unless `below` says that `high` itself is out. `least`: what the lowest value costs, for errors.
struct KeyRange {
  double low, high;
  bool below = false;
  const char* least = "";
};

struct ManifestKey {
  std::string path;  // "zero_optimization.stage"
  KeyTarget target;
  std::string literal;  // the default as TOML; or, when `optional`, an example: the key then has no default
  std::string doc;      // one sentence, units included
  bool optional = false;
  KeyRange range{};                     // numbers only
  std::vector<KeyChoice> choices = {};  // words only
  std::string deepspeed = "";           // full path of a DeepSpeed spelling that is accepted too
};

struct ManifestSection {
  std::string path;
  std::string doc;
};

// Works, with a warning, as `replacement` = "cpu" or "none"; an error beside any key of the replacement's section.
struct DeprecatedKey {
  std::string path;
  std::string replacement;
};

// Known from DeepSpeed configs, not a key here; the text says what to do instead.
struct RefusedKey {
  std::string path;
  std::string reason;
};

const std::vector<ManifestSection>& manifest_sections();
const std::vector<ManifestKey>& manifest_keys();
const std::vector<DeprecatedKey>& deprecated_keys();
const std::vector<RefusedKey>& refused_keys();

const ManifestKey* find_manifest_key(std::string_view path);  // NULL when there is none
bool is_manifest_section(std::string_view path);

// "whole number", "true or false", "one of none, cpu, nvme", ...
std::string key_type_name(const ManifestKey& key);
// The value of a key as text, words for choices; NOT_FOUND for an unknown key.
Status setting_text(const Settings& settings, const std::string& path, std::string* text);
// The value of a key that there is, as an error cites it: "4000000", or "1000000000, the default" where nobody gave it.
std::string value_in_words(const Settings& settings, const std::string& path);
// "0 to 3", "0 or more"; "" when there is no range.
std::string key_range_name(const ManifestKey& key);

}  // namespace strata
