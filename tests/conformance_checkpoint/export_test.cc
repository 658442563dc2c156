// export_test.cc - the one weight file: every param with its exact bits, valid safetensors, the same from any world.
// (That plain h5py reads it is tested in tests/python/test_checkpoint_files.py.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/conformance_checkpoint/model.h"

namespace fs = std::filesystem;

namespace strata::test {
namespace {

using nlohmann::json;
using testing::HasSubstr;

// A safetensors file read by its specification: a header, and gapless byte ranges up to the end of the file.
struct SafeTensors {
  explicit SafeTensors(const std::string& path) : bytes(read_file(path)) {
    uint64_t n = 0;
    std::memcpy(&n, bytes.data(), 8);
    if (n > bytes.size() - 8) throw std::runtime_error("header is longer than the file");
    header = json::parse(bytes.substr(8, n));
    data = 8 + n;
  }

  std::string gap() const {
    std::vector<std::pair<uint64_t, uint64_t>> ranges;
    for (const auto& [name, t] : header.items()) {
      if (name == "__metadata__") continue;
      uint64_t elements = 1;
      for (uint64_t d : t.at("shape")) elements *= d;
      const uint64_t begin = t.at("data_offsets").at(0), end = t.at("data_offsets").at(1);
      const std::string dtype = t.at("dtype");
      const uint64_t size = dtype == "F32" ? 4 : dtype == "U8" ? 1 : 2;
      if (end - begin != elements * size) return name + " has the wrong length";
      ranges.push_back({begin, end});
    }
    std::sort(ranges.begin(), ranges.end());
    uint64_t at = 0;
    for (const auto& r : ranges) {
      if (r.first != at) return "gap or overlap at " + std::to_string(at);
      at = r.second;
    }
    return data + at == bytes.size() ? "" : "bytes after the last tensor";
  }

  std::string tensor(const std::string& name) const {
    const auto& range = header.at(name).at("data_offsets");
    const uint64_t begin = range.at(0), end = range.at(1);
    return bytes.substr(data + begin, end - begin);
  }

  std::string bytes;
  json header;
  uint64_t data = 0;
};

std::string expected_bytes(const Model& m, const ParamSpec& p) {
  std::string out(p.elements() * dtype_bytes(p.dtype), '\0');
  m.fill(p.segment, 0, p.offset, p.elements(), out.data());
  return out;
}

void expect_exact(const Model& m, const std::string& path) {
  const SafeTensors file(path);
  EXPECT_EQ(file.gap(), "");
  for (const ParamSpec& p : m.params) {
    if (p.is_alias) {
      EXPECT_EQ(file.header.at("__metadata__").at(p.name), p.alias_of);
      EXPECT_FALSE(file.header.contains(p.name));
      continue;
    }
    EXPECT_EQ(file.header.at(p.name).at("shape"), json(p.shape)) << p.name;
    EXPECT_EQ(file.tensor(p.name), expected_bytes(m, p)) << p.name;
  }
}

TEST(Export, ExactAndTheSameFromEveryWorld) {
  TempDir dir;
  std::string first;
  for (int world = 1; world <= 4; ++world) {
    Model m = ordinary_model(5);
    m.shard(world);
    const std::string name = "w" + std::to_string(world) + ".safetensors";
    ASSERT_EQ(export_file(m, dir.path, name), STRATA_OK) << failure_text(STRATA_INTERNAL);
    expect_exact(m, dir.path + "/" + name);
    if (world == 1) first = read_file(dir.path + "/" + name);
    EXPECT_TRUE(read_file(dir.path + "/" + name) == first) << "world " << world;
  }
  for (const auto& entry : fs::directory_iterator(dir.path)) EXPECT_EQ(entry.path().extension(), ".safetensors");
}

TEST(Export, ManyNames) {
  TempDir dir;
  Model m;
  const auto s = m.segment("u", {{"weight", STRATA_BF16}});
  for (int k = 0; k < 5000; ++k) m.param(s, "model.layers.with_a_name_of_40_bytes." + std::to_string(k), {3, 5});
  m.param(s, std::string(70000, 'n'), {2});
  m.shard(3);
  ASSERT_EQ(export_file(m, dir.path, "w.h5"), STRATA_OK) << failure_text(STRATA_INTERNAL);
  expect_exact(m, dir.path + "/w.h5");
}

TEST(Export, NothingAtAll) {
  TempDir dir;
  Model m;
  m.shard(2);
  ASSERT_EQ(export_file(m, dir.path, "w.h5"), STRATA_OK) << failure_text(STRATA_INTERNAL);
  expect_exact(m, dir.path + "/w.h5");
}

TEST(Export, NeverReplacesAFile) {
  TempDir dir;
  Model m = ordinary_model();
  m.shard(2);
  write_file(dir.path + "/w.h5", "mine");
  EXPECT_EQ(export_file(m, dir.path, "w.h5"), STRATA_ALREADY_EXISTS);
  EXPECT_EQ(read_file(dir.path + "/w.h5"), "mine");
}

TEST(Export, RefusesNamesThatSafetensorsKeeps) {
  TempDir dir;
  for (const char* name : {"__metadata__", "__hdf5_00000__"}) {
    Model m;
    const auto s = m.segment("u", {{"weight", STRATA_F32}});
    m.param(s, name, {2});
    m.shard(1);
    EXPECT_EQ(export_file(m, dir.path, "w.h5"), STRATA_INVALID_ARGUMENT);
    EXPECT_TRUE(fs::is_empty(dir.path));
  }
}

TEST(Export, ARankThatDidNotWriteIsNamed) {
  TempDir dir;
  Model m = ordinary_model();
  m.shard(2);
  Instance instance;
  strata_ckpt_save* zero = nullptr;
  SaveArgs args(m, dir.path, "w.h5", 0);
  ASSERT_EQ(instance.api->export_weights(instance.self, &args.c, 0, &zero), STRATA_OK);
  ASSERT_EQ(instance.api->export_weights(instance.self, &args.c, 1, &zero), STRATA_OK);
  EXPECT_EQ(instance.api->commit(instance.self, zero), STRATA_FAILED_PRECONDITION);
  EXPECT_THAT(failure_text(STRATA_FAILED_PRECONDITION), HasSubstr("rank 1's file"));
  EXPECT_TRUE(fs::is_empty(dir.path));
}

TEST(Export, ARankInAnotherDirectoryOrWithOtherArgumentsIsRefused) {
  TempDir dir;
  Model m = ordinary_model(1), other = ordinary_model(2);
  m.shard(2);
  other.shard(2);
  Instance instance;
  strata_ckpt_save *zero = nullptr, *one = nullptr;
  SaveArgs args(m, dir.path + "/here", "w.h5", 0), lost(m, dir.path + "/there", "w.h5", 1),
      wrong(other, dir.path + "/here", "w.h5", 1);
  ASSERT_EQ(instance.api->export_weights(instance.self, &args.c, 0, &zero), STRATA_OK);
  EXPECT_EQ(instance.api->export_weights(instance.self, &lost.c, 1, &one), STRATA_FAILED_PRECONDITION);
  EXPECT_THAT(failure_text(STRATA_FAILED_PRECONDITION), HasSubstr(dir.path + "/there"));
  EXPECT_EQ(instance.api->export_weights(instance.self, &wrong.c, 1, &one), STRATA_FAILED_PRECONDITION);
  EXPECT_THAT(failure_text(STRATA_FAILED_PRECONDITION), HasSubstr("other arguments"));
  EXPECT_EQ(one, nullptr);
  instance.api->abandon(instance.self, zero);
  EXPECT_TRUE(fs::is_empty(dir.path + "/here"));
}

}  // namespace
}  // namespace strata::test
