#include "core/manifest/manifest.h"

#include <algorithm>
#include <filesystem>

#include "core/manifest/manifest_keys.h"
#include "core/manifest/manifest_rules.h"
#include "core/manifest/nearest.h"
#include "core/manifest/toml_doc.h"

namespace strata {
namespace {

using Kind = TomlValue::Kind;

// --- one value into its field ---------------------------------------------------------------------------------------

Status invalid(const std::string& text) { return {STRATA_INVALID_ARGUMENT, text}; }

std::string show_limit(const KeyRange& r) {
  char text[48];
  std::snprintf(text, sizeof(text), "%s %.10g", r.below ? "below" : "at most", r.high);
  return text;
}

Status check_range(const ManifestKey& key, const TomlValue& value, double x) {
  const KeyRange& r = key.range;
  if (r.low == 0 && r.high == 0) return Ok();
  if (x >= r.low && (r.below ? x < r.high : x <= r.high)) return Ok();
  if (x > r.high) return invalid("must be " + show_limit(r) + ", got " + show(value));
  return invalid("must be " + key_range_name(key) + ", got " + show(value) + (x < r.low ? r.least : ""));
}

Status text_value(const TomlValue& value, std::string* out) {
  if (value.kind != Kind::kString) return invalid("must be text, got " + show(value));
  if (value.s.empty()) return invalid("must not be empty");
  if (value.s.find('\0') != std::string::npos) return invalid("must not contain a NUL character");
  *out = value.s;
  return Ok();
}

Status choose(const ManifestKey& key, const TomlValue& value, const KeyChoice** out) {
  std::vector<std::string> words;
  for (const KeyChoice& choice : key.choices) {
    if (value.is_text(choice.word)) {
      *out = &choice;
      return Ok();
    }
    words.push_back(choice.word);
  }
  const std::string near = value.kind == Kind::kString ? nearest(value.s, words) : "";
  return invalid("must be " + key_type_name(key) + ", got " + show(value) +
                 (near.empty() ? "" : "; did you mean \"" + near + "\"?"));
}

// Writes a value into the field its row names. One overload per kind of KeyTarget.
struct Assign {
  const ManifestKey& key;
  const TomlValue& value;
  Settings& settings;

  Status operator()(bool& (*field)(Settings&)) const {
    if (value.kind != Kind::kBool) return invalid("must be true or false, got " + show(value));
    field(settings) = value.b;
    return Ok();
  }
  Status operator()(int64_t& (*field)(Settings&)) const {
    int64_t x = 0;
    STRATA_RETURN_IF_ERROR(whole_number(value, &x));
    STRATA_RETURN_IF_ERROR(check_range(key, value, static_cast<double>(x)));
    field(settings) = x;
    return Ok();
  }
  Status operator()(double& (*field)(Settings&)) const {
    double x = 0;
    STRATA_RETURN_IF_ERROR(finite_number(value, &x));
    STRATA_RETURN_IF_ERROR(check_range(key, value, x));
    field(settings) = x;
    return Ok();
  }
  Status operator()(std::string& (*field)(Settings&)) const {
    if (key.choices.empty()) return text_value(value, &field(settings));
    const KeyChoice* choice = nullptr;
    STRATA_RETURN_IF_ERROR(choose(key, value, &choice));
    field(settings) = choice->word;
    return Ok();
  }
  Status operator()(const ChoiceField& field) const {
    const KeyChoice* choice = nullptr;
    STRATA_RETURN_IF_ERROR(choose(key, value, &choice));
    field.set(settings, choice->number);
    return Ok();
  }
  Status operator()(std::array<double, 2>& (*field)(Settings&)) const {
    if (value.kind != Kind::kArray || value.items.size() != 2)
      return invalid("must be two numbers, as in [0.9, 0.999], got " + show(value));
    std::array<double, 2> both{};
    for (size_t i = 0; i < 2; ++i) {
      STRATA_RETURN_IF_ERROR(finite_number(value.items[i], &both[i]));
      STRATA_RETURN_IF_ERROR(check_range(key, value.items[i], both[i]));
    }
    field(settings) = both;
    return Ok();
  }
  Status operator()(std::vector<std::string>& (*field)(Settings&)) const {
    if (value.kind != Kind::kArray) return invalid("must be a list of texts, as in [\"dir\"], got " + show(value));
    std::vector<std::string> texts(value.items.size());
    for (size_t i = 0; i < texts.size(); ++i) STRATA_RETURN_IF_ERROR(text_value(value.items[i], &texts[i]));
    field(settings) = texts;
    return Ok();
  }
};

bool mentions_auto(const TomlValue& value) {
  return value.is_text("auto") || std::any_of(value.items.begin(), value.items.end(), mentions_auto);
}

Status assign(const ManifestKey& key, const TomlValue& value, Settings* settings) {
  if (mentions_auto(value))
    return invalid("= \"auto\" is refused: give a value here, or let the host override it with \"" + key.path +
                   "=...\" (" + key_type_name(key) + ")");
  return std::visit(Assign{key, value, *settings}, key.target);
}

Settings make_defaults() {
  std::string text;
  for (const ManifestKey& key : manifest_keys())
    if (!key.optional) text += key.path + " = " + key.literal + "\n";
  std::vector<TomlEntry> entries;
  Settings settings;
  Status status = parse_toml(text, "key table", &entries);
  for (const TomlEntry& entry : entries)
    if (const ManifestKey* key = find_manifest_key(entry.path); key && status.ok())
      status = assign(*key, entry.value, &settings).during(key->path);
  if (!status.ok()) std::terminate();  // the key table itself is wrong: caught by the first test that runs
  return settings;
}

// --- unknown keys ---------------------------------------------------------------------------------------------------

std::string section_name(const std::string& section) { return section.empty() ? "the top level" : "[" + section + "]"; }

// Full paths a user may have meant: keys in both spellings, and sections.
const std::vector<std::string>& known_paths() {
  static const std::vector<std::string> paths = [] {
    std::vector<std::string> all;
    for (const ManifestKey& key : manifest_keys()) {
      all.push_back(key.path);
      if (!key.deepspeed.empty()) all.push_back(key.deepspeed);
    }
    for (const ManifestSection& section : manifest_sections())
      if (!section.path.empty()) all.push_back(section.path);
    all.push_back("plugin");
    return all;
  }();
  return paths;
}

// "; it belongs in [zero_optimization]: `zero_optimization.stage`" or "; did you mean `x`?" or what the section knows.
std::string suggestion(const std::string& path) {
  const std::string leaf = leaf_of(path), parent = parent_of(path);
  std::string places;
  for (const std::string& known : known_paths())
    if (leaf_of(known) == leaf)
      places += (places.empty() ? "; it belongs in " : " or ") + section_name(parent_of(known)) + ": `" + known + "`";
  if (!places.empty()) return places;

  std::vector<std::string> siblings, leaves;
  for (const std::string& known : known_paths()) {
    if (parent_of(known) == parent) siblings.push_back(leaf_of(known));
    leaves.push_back(leaf_of(known));
  }
  const std::string sibling = nearest(leaf, siblings);
  if (!sibling.empty()) return "; did you mean `" + (parent.empty() ? "" : parent + ".") + sibling + "`?";
  std::string near = nearest(path, known_paths());
  if (near.empty()) {
    const std::string other = nearest(leaf, leaves);
    for (const std::string& known : known_paths())
      if (near.empty() && !other.empty() && leaf_of(known) == other) near = known;
  }
  if (!near.empty()) return "; did you mean `" + near + "`?";
  if (!is_manifest_section(parent)) return "";
  std::string all;
  for (const std::string& s : siblings) all += (all.empty() ? "" : ", ") + s;
  return "; " + section_name(parent) + " has: " + all;
}

// A section in [plugins], which has none, was written for the options of a plugin.
constexpr char kWhereOptionsAre[] = "; [plugins] chooses plugins, the options of one stand in [plugin.NAME]";
bool is_for_options(const std::string& section) { return section.rfind("plugins.", 0) == 0; }

// --- the whole file -------------------------------------------------------------------------------------------------

class ManifestReader {
 public:
  void take_file(const std::vector<TomlEntry>& entries) { take(entries, false); }

  void take_override(const std::string& text) {
    const std::string where = "override " + printable(text);
    const size_t equals = text.find('=');
    std::string key = text.substr(0, equals);
    key.erase(std::remove(key.begin(), key.end(), ' '), key.end());
    const bool bare =
        key.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.") == std::string::npos;
    if (equals == std::string::npos || !bare || text.find('\n') != std::string::npos)
      return error(where, "must look like key.path=value");
    const std::string value = text.substr(equals + 1);
    std::vector<TomlEntry> entries;
    if (!parse_toml(key + " = " + value, "", &entries).ok()) {
      if (!parse_toml(key + " = 0", "", &entries).ok()) return error(where, "must look like key.path=value");
      entries.back().value = {};
      entries.back().value.kind = Kind::kString;
      entries.back().value.s = value;
    }
    // The tables on the way to a dotted key are no values of their own.
    std::erase_if(entries, [&](const TomlEntry& e) { return key.rfind(e.path + ".", 0) == 0; });
    for (TomlEntry& entry : entries) entry.where = where;
    take(entries, true);
  }

  Status finish(Settings* settings, std::vector<std::string>* warnings) {
    bool values_ok = true;
    settle_deprecated();
    for (const Given& g : given_) {
      settings->given[g.key->path] = g.entry.where;
      if (g.entry.path != g.key->path) settings->spelled[g.key->path] = g.entry.path;
      const Status status = assign(*g.key, g.entry.value, settings);
      if (status.ok()) continue;
      values_ok = false;
      error(g.entry.where, "`" + g.entry.path + "` " + status.text());
    }
    for (auto& [path, option] : options_) {
      settings->given[path] = option.where;
      settings->plugin_options[leaf_of(parent_of(path))].push_back(option);
    }
    std::vector<ManifestFinding> found;
    if (values_ok) apply_manifest_rules(settings, &found, &warnings_);
    for (const ManifestFinding& f : found) error(f.where, f.text);
    if (warnings)
      for (const ManifestFinding& w : warnings_) warnings->push_back(w.where + ": " + w.text);
    return count_ > 0 ? summary() : Ok();
  }

 private:
  struct Given {
    const ManifestKey* key;
    TomlEntry entry;
  };

  void error(const std::string& where, const std::string& text) {
    if (++count_ <= kMaxManifestErrors) lines_ += (lines_.empty() ? "" : "\n") + where + ": " + text;
  }

  Status summary() const {
    const size_t more = count_ > kMaxManifestErrors ? count_ - kMaxManifestErrors : 0;
    return {STRATA_INVALID_ARGUMENT, lines_ + (more ? "\nand " + std::to_string(more) + " more errors" : "")};
  }

  // Sorts entries into given keys, plugin options and errors. A wrong section is one error, not one per key in it.
  void take(const std::vector<TomlEntry>& entries, bool from_override) {
    std::string skipped;
    for (const TomlEntry& entry : entries) {
      if (!skipped.empty() && entry.path.rfind(skipped + ".", 0) == 0) continue;
      const bool ok = entry.path.rfind("plugin.", 0) == 0 ? take_plugin(entry)
                      : entry.value.kind == Kind::kTable  ? take_section(entry)
                                                          : take_key(entry, from_override);
      if (!ok && entry.value.kind == Kind::kTable) skipped = entry.path;
    }
  }

  bool take_section(const TomlEntry& entry) {
    if (is_manifest_section(entry.path)) {
      sections_.push_back(entry.path);
      return true;
    }
    if (const ManifestKey* key = find_manifest_key(entry.path)) {
      error(entry.where, "`" + entry.path + "` must be a value (" + key_type_name(*key) + "), got a table" +
                             (is_for_options(entry.path) ? kWhereOptionsAre : ""));
    } else {
      unknown(entry);
    }
    return false;
  }

  bool take_key(const TomlEntry& entry, bool from_override) {
    if (is_manifest_section(entry.path)) {
      error(entry.where, "`" + entry.path + "` is a section: write [" + entry.path + "] and its keys below it, got " +
                             show(entry.value));
      return false;
    }
    for (const DeprecatedKey& old : deprecated_keys())
      if (old.path == entry.path) {
        deprecated_.push_back({&old, entry});
        return true;
      }
    const ManifestKey* key = find_manifest_key(entry.path);
    if (!key) {
      unknown(entry);
      return false;
    }
    for (Given& g : given_) {
      if (g.key != key) continue;
      if (!from_override) {
        error(entry.where, "`" + entry.path + "` is the same key as `" + g.entry.path + "` (" + g.entry.where +
                               "): give one of them");
        return false;
      }
      g = {key, entry};
      return true;
    }
    given_.push_back({key, entry});
    return true;
  }

  // plugin.NAME is a section of whatever that plugin declares; only the shape is checked here.
  bool take_plugin(const TomlEntry& entry) {
    const bool is_option = parent_of(entry.path) != "plugin";
    if (!is_option) {
      if (entry.value.kind == Kind::kTable) return true;
      error(entry.where, "`" + entry.path + "` must be a section [" + entry.path + "], got " + show(entry.value));
      return false;
    }
    PluginOption option{leaf_of(entry.path), false, entry.where};
    switch (entry.value.kind) {
      case Kind::kBool:
        option.value = entry.value.b;
        break;
      case Kind::kInt:
        option.value = entry.value.i;
        break;
      case Kind::kFloat:
        option.value = entry.value.f;
        break;
      case Kind::kString:
        option.value = entry.value.s;
        break;
      default:
        error(entry.where, "`" + entry.path + "` must be true, false, a number or text, got " + show(entry.value));
        return false;
    }
    options_.insert_or_assign(entry.path, option);
    return true;
  }

  void unknown(const TomlEntry& entry) {
    if (count_ >= kMaxManifestErrors) return error("", "");  // only counted: nearest keys cost time
    for (const RefusedKey& refused : refused_keys())
      if (refused.path == entry.path) return error(entry.where, "`" + entry.path + "` " + refused.reason);
    const char* const what = entry.value.kind == Kind::kTable ? "unknown section `" : "unknown key `";
    const bool options = entry.value.kind == Kind::kTable && is_for_options(entry.path);
    error(entry.where, what + printable(entry.path) + "`" + (options ? kWhereOptionsAre : suggestion(entry.path)));
  }

  // An old key alone becomes its replacement, with a warning; beside the section that replaced it, it is an error.
  void settle_deprecated() {
    for (const auto& [old, entry] : deprecated_) {
      const std::string section = parent_of(old->replacement);
      const bool beside =
          std::count(sections_.begin(), sections_.end(), section) != 0 ||
          std::any_of(given_.begin(), given_.end(), [&](const Given& g) { return parent_of(g.key->path) == section; });
      if (beside) {
        error(entry.where, "`" + entry.path + "` is deprecated and contradicts [" + section + "]: remove it");
        continue;
      }
      if (entry.value.kind != Kind::kBool) {
        error(entry.where, "`" + entry.path + "` must be true or false, got " + show(entry.value));
        continue;
      }
      TomlEntry now{old->replacement, {}, entry.where};
      now.value.kind = Kind::kString;
      now.value.s = entry.value.b ? "cpu" : "none";
      given_.push_back({find_manifest_key(old->replacement), now});
      warnings_.push_back({entry.where, "`" + entry.path + "` is deprecated: write `" + old->replacement + "` = \"" +
                                            now.value.s + "\""});
    }
  }

  std::vector<Given> given_;
  std::vector<std::pair<const DeprecatedKey*, TomlEntry>> deprecated_;
  std::map<std::string, PluginOption> options_;
  std::vector<std::string> sections_;
  std::vector<ManifestFinding> warnings_;
  std::string lines_;
  size_t count_ = 0;
};

}  // namespace

Settings default_settings() {
  static const Settings defaults = make_defaults();
  return defaults;
}

Status find_directory(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return Ok();
  const bool is_there = std::filesystem::exists(path, error);
  return {STRATA_NOT_FOUND, path + (is_there ? ": is no directory" : ": no such directory")};
}

Status read_manifest_text(const std::string& text, const std::string& name, const Overrides& overrides,
                          Settings* settings, std::vector<std::string>* warnings) {
  std::vector<TomlEntry> entries;
  STRATA_RETURN_IF_ERROR(parse_toml(text, name, &entries));
  ManifestReader reader;
  reader.take_file(entries);
  for (const std::string& o : overrides) reader.take_override(o);
  Settings result = default_settings();
  result.manifest_name = name;
  result.manifest_dir = ".";
  const Status status = reader.finish(&result, warnings);
  *settings = std::move(result);
  return status;
}

Status read_manifest(const std::string& path, const Overrides& overrides, Settings* settings,
                     std::vector<std::string>* warnings) {
  std::string text;
  STRATA_RETURN_IF_ERROR(read_text_file(path, kMaxManifestBytes, &text));
  Settings result;
  const Status status = read_manifest_text(text, path, overrides, &result, warnings);
  if (result.manifest_name.empty()) return status;  // not even TOML
  const std::filesystem::path dir = std::filesystem::path(path).parent_path();
  result.manifest_dir = dir.empty() ? "." : dir.string();
  *settings = std::move(result);
  return status;
}

}  // namespace strata
