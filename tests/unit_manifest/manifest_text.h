// manifest_text.h - reads a manifest from a test's own text, which is called "m.toml" in errors.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/manifest/manifest.h"

namespace strata::test {

inline Settings accepted(const std::string& text, const Overrides& overrides = {},
                         std::vector<std::string>* warnings = nullptr) {
  Settings settings;
  std::vector<std::string> ignored;
  const Status status = read_manifest_text(text, "m.toml", overrides, &settings, warnings ? warnings : &ignored);
  EXPECT_TRUE(status.ok()) << status.text();
  return settings;
}

// The text of the error, or "" with a test failure when there was none.
inline std::string refusal(const std::string& text, const Overrides& overrides = {}) {
  Settings settings;
  const Status status = read_manifest_text(text, "m.toml", overrides, &settings, nullptr);
  EXPECT_EQ(status.code(), STRATA_INVALID_ARGUMENT) << "accepted: " << text;
  return status.text();
}

}  // namespace strata::test
