// roundtrip_test.cc - what was saved comes back, bit for bit, at every world size and cut; arguments are checked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

#include "tests/conformance_checkpoint/model.h"

namespace fs = std::filesystem;

namespace strata::test {
namespace {

using testing::HasSubstr;

// The whole of a save that is expected to fail, as "code: text".
std::string failed_write(const Model& model, const std::string& root, const std::string& tag, strata_status expected,
                         int rank = 0) {
  Instance instance;
  SaveArgs args(model, root, tag, rank);
  strata_ckpt_save* s = nullptr;
  const strata_status code = instance.api->write(instance.self, &args.c, &s);
  EXPECT_EQ(code, expected);
  EXPECT_EQ(s, nullptr);
  if (s) instance.api->abandon(instance.self, s);
  return failure_text(code);
}

TEST(Roundtrip, EveryWorldAndCut) {
  for (int world = 1; world <= 4; ++world) {
    TempDir dir;
    Model m = ordinary_model(static_cast<uint64_t>(world));
    m.shard(world);
    ASSERT_EQ(save(m, dir.path, "t"), STRATA_OK) << failure_text(STRATA_INTERNAL);
    for (int cuts : {1, 2, 3, 4, 7}) EXPECT_EQ(difference(m, dir.path, "t", cuts), "") << world << " " << cuts;
    EXPECT_EQ(difference(m, dir.path, nullptr), "");
    EXPECT_FALSE(fs::exists(dir.path + "/.t.partial"));
    EXPECT_EQ(read_file(dir.path + "/latest"), "t\n");
  }
}

TEST(Roundtrip, MakesItsRootAndSaysSoOnceButNotItsParent) {
  TempDir dir;
  Model m = ordinary_model(1);
  m.shard(2);
  const std::string root = dir.path + "/checkpoints";
  EXPECT_EQ(failed_write(m, root + "/typo", "t", STRATA_NOT_FOUND),
            "checkpoint write: " + root + "/typo: there is no directory " + root);
  EXPECT_TRUE(fs::is_empty(dir.path));
  Instance instance(0, 2);
  std::vector<strata_ckpt_save*> saves(2);
  for (int r = 0; r < 2; ++r) {
    SaveArgs args(m, root, "t", r);
    ASSERT_EQ(instance.api->write(instance.self, &args.c, &saves[static_cast<size_t>(r)]), STRATA_OK);
  }
  for (strata_ckpt_save* s : saves) EXPECT_EQ(instance.api->commit(instance.self, s), STRATA_OK);
  int said = 0;
  for (const std::string& line : instance.rank->log_lines) said += line.find(root + ": made") != std::string::npos;
  EXPECT_EQ(said, 1);
}

TEST(Roundtrip, ContentsAreRealData) {  // a comparison that cannot fail would pass the test above
  TempDir dir;
  Model m = ordinary_model(1), other = ordinary_model(2);
  m.shard(2);
  other.shard(2);
  other.metas = m.metas;
  ASSERT_EQ(save(m, dir.path, "t"), STRATA_OK);
  EXPECT_THAT(difference(other, dir.path, "t"), HasSubstr("bits of weight"));
}

TEST(Roundtrip, UnevenOwnership) {
  TempDir dir;
  Model m = ordinary_model();
  m.shard(3);
  for (SegmentSpec& s : m.segments) {  // nothing for rank 1, and rank 2 before rank 0
    const uint64_t first = 2048;
    s.owned = {{first, s.elements - first}, {0, 0}, {0, first}};
  }
  ASSERT_EQ(save(m, dir.path, "t"), STRATA_OK) << failure_text(STRATA_INTERNAL);
  EXPECT_EQ(difference(m, dir.path, "t", 5), "");
}

TEST(Roundtrip, EveryDtype) {
  TempDir dir;
  Model m;
  for (strata_dtype t : {STRATA_F32, STRATA_BF16, STRATA_F16, STRATA_U8, STRATA_U16, STRATA_I64, STRATA_F64}) {
    const auto s = m.segment("s" + std::to_string(t), {{"weight", t}});
    m.param(s, "p" + std::to_string(t), {33, 65});
  }
  m.shard(2);
  ASSERT_EQ(save(m, dir.path, "t"), STRATA_OK) << failure_text(STRATA_INTERNAL);
  EXPECT_EQ(difference(m, dir.path, "t", 3), "");
}

TEST(Roundtrip, NothingAtAll) {
  TempDir dir;
  Model m;
  m.shard(2);
  ASSERT_EQ(save(m, dir.path, "t"), STRATA_OK) << failure_text(STRATA_INTERNAL);
  EXPECT_EQ(difference(m, dir.path, "t"), "");
}

TEST(Roundtrip, WithoutDirectIoAndVerification) {
  TempDir dir;
  Model m = ordinary_model();
  m.shard(2);
  Options options;
  options.set("direct_io", false).set("verify", false).set("io_threads", 1);
  Instance instance(0, 2, &options);
  strata_ckpt_save* saves[2] = {};
  for (int r = 0; r < 2; ++r) {
    SaveArgs args(m, dir.path, "t", r);
    ASSERT_EQ(instance.api->write(instance.self, &args.c, &saves[r]), STRATA_OK);
  }
  for (auto* s : saves) ASSERT_EQ(instance.api->commit(instance.self, s), STRATA_OK);
  EXPECT_EQ(difference(m, dir.path, "t", 3, &options), "");
}

TEST(Roundtrip, ManyAndLongNamesAndMeta) {
  TempDir dir;
  Model m;
  const auto s = m.segment("unit/bf16", {{"weight", STRATA_BF16}, {"master", STRATA_F32}});
  for (int k = 0; k < 5000; ++k) {
    std::string name = "model.layers." + std::to_string(k) + ".";
    name.resize(40, 'x');
    m.param(s, name, {3, 5});
  }
  m.param(s, std::string(70000, 'n'), {2, 2});
  m.param(s, "deep/" + std::string(69990, '/'), {2});
  m.meta("manifest", std::string(200 << 10, 'm'));
  m.shard(2);
  ASSERT_EQ(save(m, dir.path, "t"), STRATA_OK) << failure_text(STRATA_INTERNAL);
  EXPECT_EQ(difference(m, dir.path, "t"), "");
}

TEST(Roundtrip, MetaKeepsTypesAndBits) {
  TempDir dir;
  Model m;
  m.shard(1);
  m.meta("min", std::numeric_limits<int64_t>::min());
  m.meta("max", std::numeric_limits<int64_t>::max());
  m.meta("one", int64_t{1});
  m.meta("one as float", 1.0);
  m.meta_bool("no", false);
  m.meta_bool("yes", true);
  for (double f : {0.1, -0.0, 5e-324, 1e308, std::nan("7"), HUGE_VAL, -HUGE_VAL}) m.meta("f", f);
  m.meta("empty", std::string());
  m.meta("", std::string("\"\\\n\t\x7f \xF0\x9F\x98\x80"));
  ASSERT_EQ(save(m, dir.path, "t"), STRATA_OK) << failure_text(STRATA_INTERNAL);
  EXPECT_EQ(difference(m, dir.path, "t"), "");
}

TEST(Roundtrip, MovedDirectoryAndOtherWorkingDirectory) {
  TempDir dir;
  Model m = ordinary_model();
  m.shard(2);
  ASSERT_EQ(save(m, dir.path + "/a", "t"), STRATA_OK);
  fs::rename(dir.path + "/a", dir.path + "/b");
  fs::rename(dir.path + "/b/t", dir.path + "/b/renamed");
  EXPECT_EQ(difference(m, dir.path + "/b/", "renamed"), "");
}

TEST(Roundtrip, ReadsOnlyWhatItNeeds) {
  TempDir dir;
  Model m;
  const auto s = m.segment("u", {{"weight", STRATA_F32}});
  m.param(s, "p", {4, 1 << 20});
  m.shard(4);
  ASSERT_EQ(save(m, dir.path, "t"), STRATA_OK);
  const auto read_so_far = [] {
    std::ifstream in("/proc/self/io");
    std::string key;
    uint64_t value = 0;
    in >> key >> value;  // rchar
    return value;
  };
  Instance instance;
  strata_ckpt_load* load = nullptr;
  ASSERT_EQ(instance.api->load_open(instance.self, dir.path.c_str(), "t", &load), STRATA_OK);
  std::vector<float> out(2 << 20);
  const uint64_t before = read_so_far();
  for (uint64_t at = 0; at < out.size(); at += 1000) {  // two shards, in small pieces
    const uint64_t n = std::min<uint64_t>(1000, out.size() - at);
    ASSERT_EQ(instance.api->load_read(load, 0, "weight", (1 << 20) + at, n, out.data() + at), STRATA_OK);
  }
  const uint64_t bytes = read_so_far() - before;
  instance.api->load_close(load);
  EXPECT_GE(bytes, out.size() * 4);
  EXPECT_LE(bytes, out.size() * 4 * 2 + (1 << 20));  // a block once whole, and its parts
}

// Each kind of tag that is refused, with the words for it; a file name is held to the same but for its ending.
TEST(Arguments, NamesThatCannotBeTagsAreRefusedWithTheReason) {
  TempDir dir;
  Model m;
  m.shard(1);
  const std::pair<std::string, const char*> names[] = {
      {"", "0 bytes"},
      {std::string(201, 't'), "201 bytes"},
      {".", "begins with a dot"},
      {"..", "begins with a dot"},
      {".t.partial", "begins with a dot"},
      {".latest.next", "begins with a dot"},
      {"a/b", "one path component"},
      {" ", "is blank"},
      {" \t ", "is blank"},
      {" a", "white space"},
      {"a ", "white space"},
      {"a\n", "white space"},
      {"a\nb", "control character"},
      {"a\x7f", "control character"},
      {"latest", "names the newest checkpoint"},
  };
  Instance instance;
  for (const auto& [name, reason] : names) {
    EXPECT_THAT(failed_write(m, dir.path, name, STRATA_INVALID_ARGUMENT), HasSubstr(reason)) << name;
    strata_ckpt_load* load = nullptr;
    EXPECT_EQ(instance.api->load_open(instance.self, dir.path.c_str(), name.c_str(), &load), STRATA_INVALID_ARGUMENT);
    EXPECT_THAT(failure_text(STRATA_INVALID_ARGUMENT), HasSubstr(reason)) << name;
    EXPECT_EQ(export_file(m, dir.path, name), STRATA_INVALID_ARGUMENT);
    EXPECT_THAT(failure_text(STRATA_INVALID_ARGUMENT), HasSubstr(reason)) << name;
  }
  EXPECT_THAT(failed_write(m, dir.path, "x.weights.h5", STRATA_INVALID_ARGUMENT), HasSubstr("as weight files do"));
  EXPECT_TRUE(fs::is_empty(dir.path));
  EXPECT_EQ(export_file(m, dir.path, "x.weights.h5"), STRATA_OK);
  EXPECT_EQ(save(m, dir.path, "step 1, \xc3\xa9t\xc3\xa9"), STRATA_OK) << "spaces inside and UTF-8 are fine";
}

TEST(Arguments, WrongDescriptionsAreRefusedBeforeAnythingIsWritten) {
  TempDir dir;
  const auto refused = [&](const std::string& text, void (*spoil)(Model&)) {
    Model m = ordinary_model();
    m.shard(2);
    spoil(m);
    EXPECT_THAT(failed_write(m, dir.path, "t", STRATA_INVALID_ARGUMENT), HasSubstr(text));
  };
  refused("two params are named 'a'", [](Model& m) { m.params[1].name = "a"; });
  refused("param 'frozen' names segment 9 of 3", [](Model& m) { m.params[7].segment = 9; });
  refused("of segment 'layer1/f32'", [](Model& m) { m.params[5].offset = 1 << 20; });
  refused("unknown dtype 77", [](Model& m) { m.params[0].dtype = 77; });
  refused("is F32 but 'weight'", [](Model& m) { m.params[0].dtype = STRATA_F32; });
  refused("dimension -1", [](Model& m) { m.params[0].shape[0] = -1; });
  refused("too large", [](Model& m) { m.params[0].shape = {1 << 30, 1 << 30, 1 << 30}; });
  refused("not a param with storage", [](Model& m) { m.params.back().alias_of = "nobody"; });
  refused("differ in shape", [](Model& m) { m.params.back().shape = {1}; });
  refused("not multiples of 2048", [](Model& m) { m.segments[0].owned[0].second -= 1; });
  refused("owned elements", [](Model& m) { m.segments[0].owned[0].second = 1 << 30; });
  refused("two arrays", [](Model& m) { m.segments[0].arrays[1].name = "weight"; });
  refused("not UTF-8", [](Model& m) { m.params[1].name = "\xff"; });
  EXPECT_TRUE(fs::is_empty(dir.path));
}

TEST(Arguments, ReadChecksItsRange) {
  TempDir dir;
  Model m = ordinary_model();
  m.shard(2);
  ASSERT_EQ(save(m, dir.path, "t"), STRATA_OK);
  Instance instance;
  strata_ckpt_load* load = nullptr;
  ASSERT_EQ(instance.api->load_open(instance.self, dir.path.c_str(), nullptr, &load), STRATA_OK);
  char out[64];
  const auto read = [&](uint64_t param, const char* array, uint64_t offset, uint64_t count) {
    return instance.api->load_read(load, param, array, offset, count, out);
  };
  EXPECT_EQ(read(1, "weight", 7, 0), STRATA_OK);
  EXPECT_EQ(read(1, "weight", 7, 1), STRATA_OUT_OF_RANGE);
  EXPECT_EQ(read(1, "weight", UINT64_MAX, 2), STRATA_OUT_OF_RANGE);
  EXPECT_EQ(read(1, "grad", 0, 1), STRATA_NOT_FOUND);
  EXPECT_THAT(failure_text(STRATA_NOT_FOUND), HasSubstr("no array 'grad' was saved for param 'layers.0/attn/bias'"));
  EXPECT_EQ(read(m.params.size(), "weight", 0, 1), STRATA_INVALID_ARGUMENT);
  instance.api->load_close(load);
}

TEST(Arguments, StructsMayGrow) {  // a longer element struct of a newer host: strides and sizes are honoured
  TempDir dir;
  Model m = ordinary_model();
  m.shard(1);
  struct LongParam {
    strata_ckpt_param p;
    char tail[24];
  };
  SaveArgs args(m, dir.path, "t", 0);
  std::vector<LongParam> longer;
  for (uint64_t k = 0; k < args.c.param_count; ++k) {
    longer.push_back({args.c.params[k], "more"});
    longer.back().p.struct_size = sizeof(LongParam);
  }
  args.c.params = &longer[0].p;
  args.c.param_stride = sizeof(LongParam);
  Instance instance;
  strata_ckpt_save* s = nullptr;
  ASSERT_EQ(instance.api->write(instance.self, &args.c, &s), STRATA_OK);
  ASSERT_EQ(instance.api->commit(instance.self, s), STRATA_OK);
  EXPECT_EQ(difference(m, dir.path, "t"), "");
  longer[0].p.struct_size = 16;
  SaveArgs again(m, dir.path, "u", 0);
  again.c.params = &longer[0].p;
  again.c.param_stride = sizeof(LongParam);
  EXPECT_EQ(instance.api->write(instance.self, &again.c, &s), STRATA_INVALID_ARGUMENT);
}

TEST(Commit, ATagIsReplaced) {
  TempDir dir;
  Model m = ordinary_model(1), other = ordinary_model(2);
  m.shard(3);
  other.shard(1);
  ASSERT_EQ(save(m, dir.path, "t", true), STRATA_OK);
  ASSERT_EQ(save(m, dir.path, "u"), STRATA_OK);
  ASSERT_EQ(save(other, dir.path, "t"), STRATA_OK);
  EXPECT_EQ(difference(other, dir.path, "t"), "");
  EXPECT_EQ(difference(other, dir.path, nullptr), "") << "latest names it";
  EXPECT_EQ(difference(m, dir.path, "u"), "");
  EXPECT_FALSE(fs::exists(dir.path + "/t/weights.h5")) << "nothing of the old one is left";
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path), {}), 3);
}

TEST(Commit, AbandonLeavesNothing) {
  TempDir dir;
  Model m = ordinary_model();
  m.shard(2);
  Instance instance;
  strata_ckpt_save* saves[2] = {};
  for (int r = 0; r < 2; ++r) {
    SaveArgs args(m, dir.path + "/root", "t", r);
    ASSERT_EQ(instance.api->write(instance.self, &args.c, &saves[r]), STRATA_OK);
  }
  EXPECT_TRUE(fs::exists(dir.path + "/root/.t.partial/rank00001.h5"));
  for (auto* s : saves) instance.api->abandon(instance.self, s);
  EXPECT_TRUE(fs::is_empty(dir.path + "/root"));
}

TEST(Commit, FailedReadLeavesNothingAndKeepsItsCode) {
  TempDir dir;
  Model m = ordinary_model();
  m.shard(1);
  Instance instance;
  SaveArgs args(m, dir.path + "/root", "t", 0);
  args.fail_at = 3;
  args.fail_with = STRATA_UNAVAILABLE;
  strata_ckpt_save* s = nullptr;
  EXPECT_EQ(instance.api->write(instance.self, &args.c, &s), STRATA_UNAVAILABLE);
  EXPECT_EQ(s, nullptr);
  EXPECT_TRUE(fs::is_empty(dir.path + "/root"));
}

TEST(Commit, RanksInDifferentDirectoriesAreNoticed) {
  TempDir dir;
  Model m = ordinary_model();
  m.shard(2);
  Instance instance;
  strata_ckpt_save* saves[2] = {};
  SaveArgs here(m, dir.path + "/here", "t", 0), there(m, dir.path + "/there", "t", 1);
  ASSERT_EQ(instance.api->write(instance.self, &here.c, &saves[0]), STRATA_OK);
  ASSERT_EQ(instance.api->write(instance.self, &there.c, &saves[1]), STRATA_OK);
  EXPECT_EQ(instance.api->commit(instance.self, saves[1]), STRATA_OK);
  EXPECT_EQ(instance.api->commit(instance.self, saves[0]), STRATA_FAILED_PRECONDITION);
  EXPECT_THAT(failure_text(STRATA_FAILED_PRECONDITION), HasSubstr("rank 1's file " + dir.path + "/here"));
  EXPECT_TRUE(fs::is_empty(dir.path + "/here"));
}

TEST(Commit, LeftoversOfADeadRunNeverMix) {
  TempDir dir;
  Model dead = ordinary_model(1), live = ordinary_model(2);
  dead.shard(3);
  live.shard(2);
  {
    Instance instance;  // a run of three ranks that dies before its commit: the handles are leaked on purpose
    for (int r = 0; r < 3; ++r) {
      SaveArgs args(dead, dir.path, "t", r);
      strata_ckpt_save* s = nullptr;
      ASSERT_EQ(instance.api->write(instance.self, &args.c, &s), STRATA_OK);
      if (r != 0) {
        instance.api->commit(instance.self, s);  // frees the handle and its lock, keeps the file
      } else {
        instance.api->abandon(instance.self, s);
      }
    }
  }
  write_file(dir.path + "/.t.partial/.rank00001.h5", "half a file");
  ASSERT_TRUE(fs::exists(dir.path + "/.t.partial/rank00002.h5"));
  {  // rank 1 forgets to write here: its old file must not be taken
    Instance instance;
    SaveArgs args(live, dir.path, "t", 0);
    strata_ckpt_save* s = nullptr;
    const fs::path old = dir.path + "/.t.partial", copy = dir.path + "/copy";
    fs::copy(old, copy);
    ASSERT_EQ(instance.api->write(instance.self, &args.c, &s), STRATA_OK);
    EXPECT_EQ(instance.api->commit(instance.self, s), STRATA_FAILED_PRECONDITION);
    EXPECT_THAT(failure_text(STRATA_FAILED_PRECONDITION), HasSubstr("rank00001.h5 belongs to another save"));
    fs::remove_all(old);
    fs::rename(copy, old);
  }
  ASSERT_EQ(save(live, dir.path, "t"), STRATA_OK) << failure_text(STRATA_INTERNAL);
  EXPECT_EQ(difference(live, dir.path, nullptr), "");
  EXPECT_FALSE(fs::exists(dir.path + "/t/rank00002.h5"));
  EXPECT_FALSE(fs::exists(dir.path + "/t/.rank00001.h5"));
}

TEST(Commit, UncoveredParamIsNamed) {
  TempDir dir;
  Model m = ordinary_model();
  m.shard(2);
  m.segments[1].owned[1] = {0, 0};
  EXPECT_EQ(save(m, dir.path, "t"), STRATA_FAILED_PRECONDITION);
  EXPECT_THAT(failure_text(STRATA_FAILED_PRECONDITION), HasSubstr("no rank owns some elements of param 'wide'"));
  m.segments[1].owned[1] = m.segments[1].owned[0];
  EXPECT_EQ(save(m, dir.path, "t"), STRATA_FAILED_PRECONDITION);
  EXPECT_THAT(failure_text(STRATA_FAILED_PRECONDITION), HasSubstr("rank 1 and another own element 0"));
  EXPECT_TRUE(fs::is_empty(dir.path));
}

TEST(Commit, TwoRanksWithTheSameNumber) {
  TempDir dir;
  Model m = ordinary_model();
  m.shard(2);
  Instance one, two;
  strata_ckpt_save* s = nullptr;
  SaveArgs args(m, dir.path, "t", 0);
  ASSERT_EQ(one.api->write(one.self, &args.c, &s), STRATA_OK);
  EXPECT_THAT(failed_write(m, dir.path, "t", STRATA_FAILED_PRECONDITION), HasSubstr("/.t.lock is locked"));
  EXPECT_TRUE(fs::exists(dir.path + "/.t.partial/rank00000.h5"));
  SaveArgs second(m, dir.path, "t", 1);
  strata_ckpt_save *first_one = nullptr, *another = nullptr;
  ASSERT_EQ(two.api->write(two.self, &second.c, &first_one), STRATA_OK);
  EXPECT_EQ(one.api->write(one.self, &second.c, &another), STRATA_FAILED_PRECONDITION);
  EXPECT_THAT(failure_text(STRATA_FAILED_PRECONDITION), HasSubstr("rank00001.h5: is being written by somebody else"));
  two.api->abandon(two.self, first_one);
  one.api->abandon(one.self, s);
  EXPECT_TRUE(fs::is_empty(dir.path));
}

TEST(Threads, RanksAndReadersAtOnce) {
  TempDir dir;
  Model old = ordinary_model(9);
  old.shard(3);
  ASSERT_EQ(save(old, dir.path, "old"), STRATA_OK);
  constexpr int kWorld = 4;
  Model m = ordinary_model(3);
  m.shard(kWorld);
  for (int round = 0; round < 3; ++round) {
    const std::string tag = "t" + std::to_string(round);
    std::vector<std::unique_ptr<Instance>> instances;
    std::vector<strata_ckpt_save*> saves(kWorld, nullptr);
    std::vector<strata_status> codes(kWorld, STRATA_UNKNOWN);
    for (int r = 0; r < kWorld; ++r) instances.push_back(std::make_unique<Instance>(r, kWorld));
    std::vector<std::thread> threads;
    std::string seen = "not run";
    for (int r = 0; r < kWorld; ++r) {
      threads.emplace_back([&, r] {
        const auto k = static_cast<size_t>(r);
        SaveArgs args(m, dir.path, tag, r);
        codes[k] = instances[k]->api->write(instances[k]->self, &args.c, &saves[k]);
      });
    }
    threads.emplace_back([&] { seen = difference(old, dir.path, "old", 3); });
    for (std::thread& t : threads) t.join();
    EXPECT_EQ(seen, "");
    for (size_t k = 0; k < kWorld; ++k) {
      ASSERT_EQ(codes[k], STRATA_OK);
      EXPECT_EQ(instances[k]->api->commit(instances[k]->self, saves[k]), STRATA_OK);
    }
    EXPECT_EQ(difference(m, dir.path, nullptr), "");
  }
}

}  // namespace
}  // namespace strata::test
