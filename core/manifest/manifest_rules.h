// manifest_rules.h - what one manifest key demands of another: contradictions, and keys without effect.
#pragma once

#include <string>
#include <vector>

#include "core/manifest/settings.h"
#include "core/status.h"

namespace strata {

struct ManifestFinding {
  std::string where;  // "zero3.toml:12:1"
  std::string text;
};

// Checks values that are each valid alone. A key the user gave that changes nothing under the other settings is an
// error, or a warning when no_effect_keys = "warn"; a default never is. Also fills in defaults that follow other keys
// (adam_w_mode with type = "Adam").
void apply_manifest_rules(Settings* settings, std::vector<ManifestFinding>* errors,
                          std::vector<ManifestFinding>* warnings);

// Where plugins.device has no memory of its own: a line for each key that gives it a part in the offloaded update.
Status refuse_part_of_host_device(const Settings& settings);

}  // namespace strata
