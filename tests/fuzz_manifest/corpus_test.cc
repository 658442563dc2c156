// Replays every file of the corpus, and the shipped manifests cut off at every byte, through the fuzz target.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

void feed(const std::string& text) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(text.data()), text.size());
}

std::string file_text(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

TEST(FuzzManifest, Corpus) {
  int count = 0;
  for (const char* dir : {"tests/fuzz_manifest/corpus", "examples/manifests"})
    for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(STRATA_SOURCE_DIR) / dir)) {
      SCOPED_TRACE(entry.path().string());
      feed(file_text(entry.path()));
      ++count;
    }
  EXPECT_GE(count, 10);
}

TEST(FuzzManifest, CutAtEveryByte) {
  const std::string text = file_text(std::filesystem::path(STRATA_SOURCE_DIR) / "examples/manifests/zero3_nvme.toml");
  ASSERT_FALSE(text.empty());
  for (size_t length = 0; length < text.size(); ++length) feed(text.substr(0, length));
}

TEST(FuzzManifest, Large) {
  feed(std::string(100'000, '['));
  feed("a = " + std::string(5'000, '['));
  feed(std::string(200'000, 'a') + " = 1");
  std::string many;
  for (int i = 0; i < 20'000; ++i) many += "optimizer" + std::to_string(i) + " = \"auto\"\n";
  feed(many);
}

}  // namespace
