#include "tools/manifest_docs.h"

#include "core/manifest/manifest_keys.h"

namespace strata {
namespace {

// Every key of one section, in table order.
std::vector<const ManifestKey*> keys_of(const std::string& section) {
  std::vector<const ManifestKey*> found;
  for (const ManifestKey& key : manifest_keys()) {
    const size_t dot = key.path.rfind('.');
    if ((dot == std::string::npos ? "" : key.path.substr(0, dot)) == section) found.push_back(&key);
  }
  return found;
}

std::string leaf(const ManifestKey& key) { return key.path.substr(key.path.rfind('.') + 1); }

std::string spelling_note(const ManifestKey& key) {
  return key.deepspeed.empty() ? "" : "Also: " + key.deepspeed.substr(key.deepspeed.rfind('.') + 1) + ".";
}

}  // namespace

std::string reference_manifest() {
  std::string text =
      "# Every key of a training manifest with its default (keys marked \"no default\": an example).\n"
      "# Made from the key table in core/manifest/manifest_keys.cc. Uncomment a line to change it, and its [section] "
      "with it.\n"
      "# Whole numbers may be written as 5e8. A key that is unknown, misplaced or without effect is an error.\n";
  for (const ManifestSection& section : manifest_sections()) {
    text += "\n## " + section.doc + ".\n";
    if (!section.path.empty()) text += "#[" + section.path + "]\n";
    for (const ManifestKey* key : keys_of(section.path)) {
      std::string about = key->choices.empty() ? key_range_name(*key) : key_type_name(*key);
      if (key->optional) about += about.empty() ? "no default" : "; no default";
      if (!about.empty()) about = "(" + about + ")";
      const bool one_line = key->doc.size() + about.size() < 115;
      text += "# " + key->doc + (about.empty() ? "" : (one_line ? " " : "\n# ") + about) + "\n";
      if (!key->deepspeed.empty()) text += "# " + spelling_note(*key) + "\n";
      text += "#" + leaf(*key) + " = " + key->literal + "\n";
    }
  }
  return text +
         "\n## Options of one plugin, by its id; each plugin's own TOML lists what it takes.\n"
         "#[plugin.NAME]\n"
         "#option = value\n";
}

std::string manifest_key_docs() {
  std::string text =
      "# Keys of a training manifest\n\n"
      "Made from the key table in core/manifest/manifest_keys.cc, as `examples/manifests/reference.toml` is. Sizes are "
      "exact "
      "whole numbers\nand may be written as `5e8`. Unknown, misplaced, contradictory and ineffective keys are errors. "
      "Options of one plugin stand\nin `[plugin.NAME]`; each plugin's own TOML lists them.\n";
  for (const ManifestSection& section : manifest_sections()) {
    const std::string title = section.path.empty() ? "Top level" : "`[" + section.path + "]`";
    text += "\n## " + title + "\n\n" + section.doc + ".\n\n| key | value | default | meaning |\n|---|---|---|---|\n";
    for (const ManifestKey* key : keys_of(section.path)) {
      const std::string range = key_range_name(*key), note = spelling_note(*key);
      text += "| `" + leaf(*key) + "` | " + key_type_name(*key) + (range.empty() ? "" : ", " + range) + " | " +
              (key->optional ? "none" : "`" + key->literal + "`") + " | " + key->doc +
              (note.empty() ? "" : " " + note) + " |\n";
    }
  }
  return text;
}

}  // namespace strata
