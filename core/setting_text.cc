// setting_text.cc - a setting as text, by its key: what strata_get_setting and reports show.
#include "core/manifest_keys.h"

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

Status setting_text(const Settings& settings, const std::string& path, std::string* text) {
  const ManifestKey* key = find_manifest_key(path);
  if (!key) return {STRATA_NOT_FOUND, "there is no setting \"" + path + "\""};
  Settings copy = settings;
  *text = std::visit(TextOf{copy, *key}, key->target);
  return Ok();
}

}  // namespace strata
