// setting_text.cc - settings in words: a value by its key, and what a key may be, for strata_get_setting, errors and
// docs.
#include "core/manifest/manifest_keys.h"

namespace strata {

namespace {

std::string text_of(double x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.17g", x);
  for (int digits = 1; digits < 17; ++digits) {  // the shortest that reads back as the same number
    char shorter[32];
    std::snprintf(shorter, sizeof(shorter), "%.*g", digits, x);
    if (std::stod(shorter) == x) return shorter;
  }
  return text;
}

// The accessors take a mutable Settings; nothing is changed here.
struct TextOf {
  Settings& settings;
  const ManifestKey& key;

  std::string operator()(bool& (*field)(Settings&)) const { return field(settings) ? "true" : "false"; }
  std::string operator()(int64_t& (*field)(Settings&)) const { return std::to_string(field(settings)); }
  std::string operator()(double& (*field)(Settings&)) const { return text_of(field(settings)); }
  std::string operator()(std::string& (*field)(Settings&)) const { return field(settings); }
  std::string operator()(std::array<double, 2>& (*field)(Settings&)) const {
    return text_of(field(settings)[0]) + ", " + text_of(field(settings)[1]);
  }
  std::string operator()(std::vector<std::string>& (*field)(Settings&)) const {
    std::string all;
    for (const std::string& one : field(settings)) all += (all.empty() ? "" : ", ") + one;
    return all;
  }
  std::string operator()(const ChoiceField& field) const {
    for (const KeyChoice& choice : key.choices) {
      if (choice.number == field.get(settings)) return choice.word;
    }
    return "";
  }
};

}  // namespace

std::string key_type_name(const ManifestKey& key) {
  if (!key.choices.empty()) {
    std::string names;
    for (const KeyChoice& c : key.choices) names += (names.empty() ? "one of \"" : ", \"") + std::string(c.word) + '"';
    return names;
  }
  static const char* const names[] = {"true or false", "whole number",    "number",      "text",
                                      "two numbers",   "a list of texts", "one of words"};
  return names[key.target.index()];
}

std::string key_range_name(const ManifestKey& key) {
  const KeyRange& r = key.range;
  if (r.low == 0 && r.high == 0) return "";
  if (r.high >= 1e9) return text_of(r.low) + " or more";
  return text_of(r.low) + (r.below ? " to below " : " to ") + text_of(r.high);
}

Status setting_text(const Settings& settings, const std::string& path, std::string* text) {
  const ManifestKey* key = find_manifest_key(path);
  if (!key) return {STRATA_NOT_FOUND, "there is no setting \"" + path + "\""};
  Settings copy = settings;
  *text = std::visit(TextOf{copy, *key}, key->target);
  return Ok();
}

std::string value_in_words(const Settings& settings, const std::string& path) {
  std::string text;
  (void)setting_text(settings, path, &text);
  return settings.is_given(path) ? text : text + ", the default";
}

}  // namespace strata
