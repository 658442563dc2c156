// The key table, the reference manifest and the shipped examples agree with each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "core/manifest/manifest_keys.h"
#include "tests/unit_manifest/manifest_text.h"
#include "tools/manifest_docs.h"

namespace strata {
namespace {

using test::accepted;
using ::testing::HasSubstr;

const std::filesystem::path kExamples = std::filesystem::path(STRATA_SOURCE_DIR) / "examples/manifests";

const std::filesystem::path kDocs = std::filesystem::path(STRATA_SOURCE_DIR) / "docs/manifest.md";

std::string file_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// The reference with every key line active; prose comments ("# " and "## ") stay comments.
std::string uncommented(const std::string& reference) {
  std::istringstream lines(reference);
  std::string out, line;
  while (std::getline(lines, line)) {
    if (line == "#[plugin.NAME]" || line == "#option = value") continue;
    const bool active = line.size() > 1 && line[0] == '#' && line[1] != ' ' && line[1] != '#';
    out += (active ? line.substr(1) : line) + "\n";
  }
  return out;
}

TEST(ManifestReference, FileOnDiskIsTheGeneratedOne) {
  EXPECT_EQ(file_text(kExamples / "reference.toml"), reference_manifest())
      << "the key table changed: run the test program with --write-reference";
  EXPECT_EQ(file_text(kDocs), manifest_key_docs());
}

TEST(ManifestReference, EveryKeyIsThereOnceWithItsDefault) {
  std::vector<std::string> warnings;
  const Settings s = accepted(
      "no_effect_keys = \"warn\"\n" +
          [] {
            std::string all = uncommented(reference_manifest());
            const std::string own = "no_effect_keys = \"error\"\n";
            return all.erase(all.find(own), own.size());
          }(),
      {}, &warnings);
  for (const ManifestKey& key : manifest_keys()) EXPECT_TRUE(s.is_given(key.path)) << key.path;
  EXPECT_EQ(s.given.size(), manifest_keys().size());

  const Settings d = default_settings();
  EXPECT_EQ(s.deadline_seconds, d.deadline_seconds);
  EXPECT_EQ(s.optimizer.betas, d.optimizer.betas);
  EXPECT_EQ(s.zero_optimization.reduce_bucket_size, d.zero_optimization.reduce_bucket_size);
  EXPECT_EQ(s.zero_optimization.offload_param.max_in_cpu, d.zero_optimization.offload_param.max_in_cpu);
  EXPECT_EQ(s.train_batch_size, 8) << "keys without a default show an example";
}

TEST(ManifestReference, AsShippedItChangesNothing) { EXPECT_TRUE(accepted(reference_manifest()).given.empty()); }

TEST(ManifestReference, TableIsWellFormed) {
  std::set<std::string> paths;
  for (const ManifestKey& key : manifest_keys()) {
    EXPECT_TRUE(paths.insert(key.path).second) << key.path << " stands twice";
    EXPECT_TRUE(key.doc.back() == '.') << key.path;
    const size_t dot = key.path.rfind('.');
    EXPECT_TRUE(is_manifest_section(dot == std::string::npos ? "" : key.path.substr(0, dot))) << key.path;
    EXPECT_TRUE(key.deepspeed.empty() || find_manifest_key(key.deepspeed) == &key) << key.deepspeed;
    EXPECT_THAT(manifest_key_docs(), HasSubstr(key.doc)) << key.path;
  }
  for (const DeprecatedKey& key : deprecated_keys()) EXPECT_NE(find_manifest_key(key.replacement), nullptr);
  for (const RefusedKey& key : refused_keys()) EXPECT_EQ(find_manifest_key(key.path), nullptr) << key.path;
}

TEST(ManifestReference, EveryExampleParsesWithoutWarnings) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kExamples)) {
    if (entry.path().extension() != ".toml") continue;
    ++count;
    Settings s;
    std::vector<std::string> warnings;
    const Status status = read_manifest(entry.path().string(), {}, &s, &warnings);
    EXPECT_TRUE(status.ok()) << status.text();
    EXPECT_THAT(warnings, ::testing::IsEmpty()) << entry.path();
    if (entry.path().filename() == "reference.toml") continue;
    EXPECT_EQ(s.zero_optimization.stage, 3) << entry.path();
    EXPECT_EQ(s.zero_optimization.param_persistence_threshold, 1000) << entry.path();
    EXPECT_TRUE(s.bf16_enabled) << entry.path();
  }
  EXPECT_GE(count, 5);
}

}  // namespace
}  // namespace strata

// --write-reference writes examples/manifests/reference.toml and docs/manifest.md from the key table.
int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "--write-reference") {
    std::ofstream(strata::kExamples / "reference.toml", std::ios::binary) << strata::reference_manifest();
    std::ofstream(strata::kDocs, std::ios::binary) << strata::manifest_key_docs();
    return 0;
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
