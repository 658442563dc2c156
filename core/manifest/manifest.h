// manifest.h - a TOML manifest becomes Settings, or a list of everything that is wrong with it.
//
// Every error of the file is reported, one a line, as "file:line:column: text" (at most kMaxManifestErrors), not only
// the first. Unknown, misplaced, deprecated, contradictory and ineffective keys are errors with the nearest known key;
// nothing is ignored. Values are taken exactly: 5e8 is an integer, 0.5 is not, "5e8" is text, "auto" is refused.
// Functions are pure apart from reading the file; any thread.
#pragma once

#include <string>
#include <vector>

#include "core/manifest/settings.h"
#include "core/status.h"

namespace strata {

inline constexpr size_t kMaxManifestErrors = 20;
inline constexpr size_t kMaxManifestBytes = 1 << 20;

// "key.path=value": replaces what the file says before it is checked, so that a host can fill in "auto". The value is
// TOML; a bare word is text (offload_param.device=cpu). The last override of a key wins.
using Overrides = std::vector<std::string>;

// `warnings` gets lines for the log; it may be NULL. On error `settings` holds what could be read, which is good for
// looking for further errors only; it is not changed when the file could not be read at all.
Status read_manifest(const std::string& path, const Overrides& overrides, Settings* settings,
                     std::vector<std::string>* warnings);
// The same from memory; `name` stands for the file in errors, relative paths start at the working directory.
Status read_manifest_text(const std::string& text, const std::string& name, const Overrides& overrides,
                          Settings* settings, std::vector<std::string>* warnings);

// What an empty manifest gives.
Settings default_settings();

// NOT_FOUND unless a directory that a manifest names, and that nobody makes, is there.
Status find_directory(const std::string& path);

}  // namespace strata
