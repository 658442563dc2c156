#include "core/manifest/plugin_toml.h"

#include <algorithm>
#include <map>

#include "core/manifest/nearest.h"
#include "core/manifest/toml_doc.h"

namespace strata {
namespace {

using Kind = TomlValue::Kind;
constexpr size_t kMaxPluginTomlBytes = 1 << 18;

Status invalid(const std::string& text) { return {STRATA_INVALID_ARGUMENT, text}; }

// Errors of one file or one section, one a line.
struct Errors {
  std::string lines;
  void add(const std::string& where, const std::string& text) {
    lines += (lines.empty() ? "" : "\n") + where + ": " + text;
  }
  Status status() const { return lines.empty() ? Ok() : invalid(lines); }
};

const char* type_name(strata_option_type type) {
  static const char* const names[] = {"?", "bool", "int", "float", "string"};
  return names[type];
}

// A value as an option of the declared type; whole floats are taken for ints, ints for floats.
Status convert(const TomlValue& value, strata_option_type type, std::variant<bool, int64_t, double, std::string>* out) {
  int64_t i = 0;
  double f = 0;
  switch (type) {
    case STRATA_OPT_BOOL:
      if (value.kind != Kind::kBool) return invalid("must be true or false, got " + show(value));
      *out = value.b;
      return Ok();
    case STRATA_OPT_INT:
      STRATA_RETURN_IF_ERROR(whole_number(value, &i));
      *out = i;
      return Ok();
    case STRATA_OPT_FLOAT:
      STRATA_RETURN_IF_ERROR(finite_number(value, &f));
      *out = f;
      return Ok();
    default:
      if (value.kind != Kind::kString) return invalid("must be text, got " + show(value));
      if (value.s.find('\0') != std::string::npos) return invalid("must not contain a NUL character");
      *out = value.s;
      return Ok();
  }
}

TomlValue to_toml(const std::variant<bool, int64_t, double, std::string>& given) {
  TomlValue v;
  v.kind = std::array{Kind::kBool, Kind::kInt, Kind::kFloat, Kind::kString}[given.index()];
  if (const auto* b = std::get_if<bool>(&given)) v.b = *b;
  if (const auto* i = std::get_if<int64_t>(&given)) v.i = *i;
  if (const auto* f = std::get_if<double>(&given)) v.f = *f;
  if (const auto* s = std::get_if<std::string>(&given)) v.s = *s;
  return v;
}

// What the file may say outside [options].
const std::vector<std::string>& known_keys() {
  static const std::vector<std::string> keys = {"manifest_version",
                                                "id",
                                                "name",
                                                "version",
                                                "license",
                                                "publisher",
                                                "url",
                                                "abi",
                                                "abi.major",
                                                "abi.min_host_minor",
                                                "library",
                                                "library.path",
                                                "provides",
                                                "provides.interfaces",
                                                "requires",
                                                "requires.host",
                                                "options"};
  return keys;
}

class PluginTomlReader {
 public:
  PluginTomlReader(const std::filesystem::path& file, PluginToml* out) : file_(file.string()), out_(*out) {}

  Status read(const std::vector<TomlEntry>& entries) {
    STRATA_RETURN_IF_ERROR(version(entries));  // a later version may mean anything by the other keys
    std::string skipped;
    for (const TomlEntry& entry : entries) {
      if (!skipped.empty() && entry.path.rfind(skipped + ".", 0) == 0) continue;
      if (entry.path.rfind("options.", 0) == 0) {
        option(entry);
      } else if (std::count(known_keys().begin(), known_keys().end(), entry.path) == 0) {
        const std::string near = nearest(entry.path, known_keys());
        errors_.add(entry.where,
                    "unknown key `" + entry.path + "`" + (near.empty() ? "" : "; did you mean `" + near + "`?"));
        skipped = entry.path;
      } else {
        entries_[entry.path] = &entry;
      }
    }
    fields();
    for (PluginOptionSpec& spec : out_.options) finish_option(spec);
    return errors_.status();
  }

 private:
  Status version(const std::vector<TomlEntry>& entries) {
    for (const TomlEntry& entry : entries) {
      if (entry.path != "manifest_version") continue;
      int64_t v = 0;
      if (const Status s = whole_number(entry.value, &v); !s.ok())
        return invalid(entry.where + ": `manifest_version` " + s.text());
      if (v == kPluginManifestVersion) return Ok();
      return {STRATA_FAILED_PRECONDITION, entry.where + ": manifest_version is " + std::to_string(v) +
                                              ", this core reads " + std::to_string(kPluginManifestVersion) +
                                              (v > kPluginManifestVersion ? ": the plugin is for a newer core" : "")};
    }
    return invalid(file_ + ": `manifest_version` is missing");
  }

  void fields() {
    text("id", true, &out_.id);
    text("name", true, &out_.name);
    text("version", true, &out_.version);
    text("license", true, &out_.license);
    std::string ignored, library;
    text("publisher", false, &ignored);
    text("url", false, &ignored);
    number("abi.major", &out_.abi_major);
    number("abi.min_host_minor", &out_.min_host_minor);
    text("library.path", true, &library);
    out_.library = std::filesystem::path(file_).parent_path() / library;
    texts("provides.interfaces", true, &out_.interfaces);
    texts("requires.host", false, &out_.host_interfaces);
    for (const char* section : {"abi", "library", "provides", "requires", "options"})
      if (const TomlEntry* entry = find(section); entry && entry->value.kind != Kind::kTable)
        errors_.add(entry->where, "`" + entry->path + "` must be a section, got " + show(entry->value));
  }

  const TomlEntry* find(const std::string& path) const {
    const auto it = entries_.find(path);
    return it == entries_.end() ? nullptr : it->second;
  }

  const TomlEntry* want(const std::string& path, bool required) {
    const TomlEntry* entry = find(path);
    if (!entry && required) errors_.add(file_, "`" + path + "` is missing");
    return entry;
  }

  void text(const std::string& path, bool required, std::string* out) {
    const TomlEntry* entry = want(path, required);
    if (!entry) return;
    std::variant<bool, int64_t, double, std::string> value;
    Status status = convert(entry->value, STRATA_OPT_STRING, &value);
    if (status.ok() && entry->value.s.empty()) status = invalid("must not be empty");
    if (status.ok()) {
      *out = entry->value.s;
    } else {
      errors_.add(entry->where, "`" + path + "` " + status.text());
    }
  }

  void texts(const std::string& path, bool required, std::vector<std::string>* out) {
    const TomlEntry* entry = want(path, required);
    if (!entry) return;
    const auto is_text = [](const TomlValue& v) { return v.kind == Kind::kString && !v.s.empty(); };
    const std::vector<TomlValue>& items = entry->value.items;
    if (entry->value.kind != Kind::kArray || !std::all_of(items.begin(), items.end(), is_text))
      return errors_.add(entry->where, "`" + path + "` must be a list of texts, got " + show(entry->value));
    for (const TomlValue& item : items) out->push_back(item.s);
  }

  void number(const std::string& path, int64_t* out) {
    const TomlEntry* entry = want(path, true);
    if (!entry) return;
    Status status = whole_number(entry->value, out);
    if (status.ok() && *out < 0) status = invalid("must be 0 or more, got " + show(entry->value));
    if (!status.ok()) errors_.add(entry->where, "`" + path + "` " + status.text());
  }

  // "options.KEY" (a table) or "options.KEY.type|default|doc".
  void option(const TomlEntry& entry) {
    const std::string parent = parent_of(entry.path);
    if (parent == "options") {
      if (entry.value.kind != Kind::kTable)
        return errors_.add(entry.where, "`" + entry.path + "` must be a table with type, default and doc");
      out_.options.push_back({leaf_of(entry.path), STRATA_OPT_BOOL, false, ""});
      entries_[entry.path] = &entry;
      return;
    }
    const std::string leaf = leaf_of(entry.path);
    if (parent_of(parent) != "options" || (leaf != "type" && leaf != "default" && leaf != "doc"))
      return errors_.add(entry.where, "unknown key `" + entry.path + "`; an option has type, default and doc");
    entries_[entry.path] = &entry;
  }

  void finish_option(PluginOptionSpec& spec) {
    const std::string base = "options." + spec.key;
    const auto missing = [&](const char* what) {
      errors_.add(find(base)->where, "`" + base + "." + what + "` is missing");
    };
    const TomlEntry* type = find(base + ".type");
    const TomlEntry* value = find(base + ".default");
    const TomlEntry* doc = find(base + ".doc");
    if (!type || !value || !doc) return missing(!type ? "type" : !value ? "default" : "doc");
    for (strata_option_type t = STRATA_OPT_BOOL; t <= STRATA_OPT_STRING; ++t)
      if (type->value.is_text(type_name(t))) spec.type = t;
    if (!type->value.is_text(type_name(spec.type)))
      return errors_.add(type->where,
                         "`" + type->path + "` must be bool, int, float or string, got " + show(type->value));
    const Status status = convert(value->value, spec.type, &spec.value);
    if (!status.ok()) errors_.add(value->where, "`" + value->path + "` " + status.text());
    text(base + ".doc", true, &spec.doc);
  }

  std::string file_;
  PluginToml& out_;
  Errors errors_;
  std::map<std::string, const TomlEntry*> entries_;
};

}  // namespace

const PluginOptionSpec* PluginToml::find_option(const std::string& key) const {
  for (const PluginOptionSpec& spec : options)
    if (spec.key == key) return &spec;
  return nullptr;
}

Status read_plugin_toml(const std::filesystem::path& file, PluginToml* out) {
  std::string text;
  STRATA_RETURN_IF_ERROR(read_text_file(file, kMaxPluginTomlBytes, &text));
  return parse_plugin_toml(text, file, out);
}

Status parse_plugin_toml(const std::string& text, const std::filesystem::path& file, PluginToml* out) {
  std::vector<TomlEntry> entries;
  STRATA_RETURN_IF_ERROR(parse_toml(text, file.string(), &entries));
  *out = {};
  out->file = file;
  return PluginTomlReader(file, out).read(entries);
}

Status merge_plugin_options(const PluginToml& plugin, const std::vector<PluginOption>& given,
                            std::vector<PluginOption>* out) {
  Errors errors;
  out->clear();
  std::vector<std::string> names;
  for (const PluginOptionSpec& spec : plugin.options) {
    out->push_back({spec.key, spec.value, plugin.file.string()});
    names.push_back(spec.key);
  }
  for (const PluginOption& option : given) {
    const std::string path = "plugin." + plugin.id + "." + option.key;
    const PluginOptionSpec* spec = plugin.find_option(option.key);
    if (!spec) {
      const std::string near = nearest(option.key, names);
      std::string all;
      for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
      errors.add(option.where, "unknown key `" + path + "`; " +
                                   (near.empty() ? plugin.id + " has: " + (all.empty() ? "no options" : all)
                                                 : "did you mean `plugin." + plugin.id + "." + near + "`?"));
      continue;
    }
    PluginOption& slot = (*out)[static_cast<size_t>(spec - plugin.options.data())];
    const Status status = convert(to_toml(option.value), spec->type, &slot.value);
    slot.where = option.where;
    if (!status.ok()) errors.add(option.where, "`" + path + "` " + status.text());
  }
  return errors.status();
}

}  // namespace strata
