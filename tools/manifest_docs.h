// manifest_docs.h - what users read about manifest keys, made from the one key table (core/manifest/manifest_keys.h).
#pragma once

#include <string>

namespace strata {

// A manifest in which every key stands commented out with its default and meaning: examples/manifests/reference.toml.
std::string reference_manifest();
// The same as a Markdown page, one table per section: docs/manifest.md.
std::string manifest_key_docs();

}  // namespace strata
