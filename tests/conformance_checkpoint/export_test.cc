// export_test.cc - the one weight file: every param with its exact bits, valid safetensors, the same from any world.
// (That plain h5py reads it is tested in tests/python/test_checkpoint_files.py.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

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

TEST(Export, APartOfACheckpointIsTheSameFile) {
  for (int world : {1, 3}) {
    TempDir dir;
    Model m = ordinary_model(5);
    m.shard(world);
    ASSERT_EQ(save(m, dir.path, "t", true), STRATA_OK) << failure_text(STRATA_INTERNAL);
    EXPECT_EQ(difference(m, dir.path, "t"), "");
    ASSERT_EQ(export_file(m, dir.path, "alone.h5"), STRATA_OK) << failure_text(STRATA_INTERNAL);
    EXPECT_TRUE(read_file(dir.path + "/t/weights.h5") == read_file(dir.path + "/alone.h5")) << "world " << world;
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(dir.path + "/t")) names.insert(entry.path().filename());
    EXPECT_EQ(names.size(), static_cast<size_t>(world) + 2) << "the rank files, the index and the weights";
  }
}

// Whatever phase fails, on whatever rank: nothing of the save remains, and the next one works.
TEST(Export, APartOfACheckpointThatFailsTakesTheCheckpointWithIt) {
  Model m = ordinary_model(5);
  m.shard(2);
  for (const uint64_t fail_at : {uint64_t{0}, uint64_t{1}}) {
    for (const int bad : {0, 1}) {
      TempDir dir;
      Instance instance;
      std::vector<strata_ckpt_save*> saves(2, nullptr);
      std::vector<strata_status> codes;
      for (int r : {0, 1}) {
        SaveArgs args(m, dir.path, "t", r);
        ASSERT_EQ(instance.api->write(instance.self, &args.c, &saves[static_cast<size_t>(r)]), STRATA_OK);
      }
      for (uint32_t phase : {0u, 1u}) {
        for (int r : {0, 1}) {
          SaveArgs args(m, dir.path, "t", r);
          args.fail_with = STRATA_DATA_LOSS;
          if (r == bad && phase == 1) args.fail_at = fail_at;
          codes.push_back(instance.api->export_weights(instance.self, &args.c, phase, &saves[static_cast<size_t>(r)]));
        }
      }
      EXPECT_EQ(codes[static_cast<size_t>(2 + bad)], STRATA_DATA_LOSS);
      for (strata_ckpt_save* s : saves) {
        if (s) instance.api->abandon(instance.self, s);
      }
      EXPECT_TRUE(fs::is_empty(dir.path)) << "rank " << bad << " failed";
      EXPECT_EQ(save(m, dir.path, "t", true), STRATA_OK);
    }
  }
}

TEST(Export, APlainSaveRemovesTheWeightsOfADeadRun) {
  TempDir dir;
  Model m = ordinary_model(5);
  m.shard(2);
  fs::create_directories(dir.path + "/.t.partial");
  for (const char* name : {"weights.h5", "layout.json", "rank0.json"})
    write_file(dir.path + "/.t.partial/" + name, "x");
  ASSERT_EQ(save(m, dir.path, "t"), STRATA_OK);
  EXPECT_FALSE(fs::exists(dir.path + "/t/weights.h5"));
  EXPECT_FALSE(fs::exists(dir.path + "/t/layout.json"));
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

TEST(Export, MakesNoDirectoryForTheFile) {
  TempDir dir;
  Model m = ordinary_model();
  m.shard(2);
  EXPECT_EQ(export_file(m, dir.path + "/typo", "w.h5"), STRATA_NOT_FOUND);
  EXPECT_EQ(failure_text(STRATA_NOT_FOUND),
            "checkpoint export: " + dir.path + "/typo/w.h5: there is no directory " + dir.path + "/typo");
  EXPECT_TRUE(fs::is_empty(dir.path));
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
  fs::create_directory(dir.path + "/here");
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
