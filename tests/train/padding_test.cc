// Padding never counts (cases.md [09]): a run of 4 ranks in which all of it is NaN has the bits of one of world 1.
//
// What the tier holds for a rank (weights, state, reduced gradients) is of a copy of offload_cpu that the test reaches
// (seen_memory.h); the fetched flat buffer is found by the views into it, and gradients are lent. No value of the model
// is 0 after the first step, so what is 0 then is padding.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/support/disk_dirs.h"
#include "tests/train/by_hand.h"
#include "tests/train/seen_memory.h"

namespace strata::test {
namespace {

constexpr int kSteps = 3;
constexpr uint64_t kPadTo = 2048;    // elements of a shard
constexpr uint16_t kNaN16 = 0x7FC5;  // no NaN that is ever computed: it was copied from padding
constexpr uint32_t kNaN32 = 0x7FC5A5A5;

ForEachPiece for_each_piece() {
  void* const library = ::dlopen(STRATA_SEEN_TIER ".so", RTLD_NOW | RTLD_LOCAL);
  void* const found = library ? ::dlsym(library, "strata_test_for_each_piece") : nullptr;
  if (!found) ADD_FAILURE() << ::dlerror();
  return reinterpret_cast<ForEachPiece>(found);
}

// NaN where there is 0 or an older NaN; returns how many.
template <class Word>
uint64_t poison(char* at, uint64_t count, Word nan, Word infinity) {
  uint64_t changed = 0;
  for (uint64_t i = 0; i < count; ++i, at += sizeof(Word)) {
    Word word;
    std::memcpy(&word, at, sizeof(word));
    if (word != 0 && (word & infinity) != infinity) continue;
    std::memcpy(at, &nan, sizeof(nan));
    ++changed;
  }
  return changed;
}

uint64_t poison(char* at, uint64_t count, uint64_t size) {
  return size == 2 ? poison<uint16_t>(at, count, kNaN16, 0x7F80) : poison<uint32_t>(at, count, kNaN32, 0x7F800000);
}

struct Poisoned {
  uint64_t elements;  // of every piece
  uint64_t pieces = 0, padding = 0;
};

void poison_piece(void* ctx, char* at, uint64_t bytes) {
  auto* poisoned = static_cast<Poisoned*>(ctx);
  const uint64_t size = bytes / poisoned->elements;
  ASSERT_EQ(size * poisoned->elements, bytes);
  ASSERT_TRUE(size == 2 || size == 4) << bytes;
  ++poisoned->pieces;
  poisoned->padding += poison(at, poisoned->elements, size);
}

std::string contents(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

struct Case {
  std::string name;
  int stage;
  strata_dtype dtype;
  std::vector<int64_t> sizes;
  bool gpu;
};

class PaddingIsNaN : public testing::TestWithParam<Case> {
 protected:
  PaddingIsNaN() {
    model_.units = {"bucket"};
    for (size_t k = 0; k < GetParam().sizes.size(); ++k) {
      model_.params.push_back({"p" + std::to_string(k), {GetParam().sizes[k]}, GetParam().dtype, 0, 0, false, -1});
    }
  }

  Trial trial(int world) const {
    Trial t;
    t.world = world;
    t.stage = GetParam().stage;
    t.clip = 0.05;
    t.offload_optimizer = "cpu";
    t.overrides = {"plugins.offload_cpu=\"" STRATA_SEEN_TIER ".toml\""};
    if (t.stage == 3) {
      t.offload_param = "cpu";
      t.overrides.push_back("zero_optimization.param_persistence_threshold=0");
    }
    if (GetParam().gpu) {
      t.gpu = "gpu_sim";
      t.gpu_delay_us = 200;
      t.lend = true;
    }
    return t;
  }

  // Elements of one rank's shard.
  uint64_t shard(int world) const {
    const uint64_t align = 256 / width();
    uint64_t all = 0;
    for (const ModelParam& p : model_.params) all = (all + align - 1) / align * align + p.numel();
    const auto ranks = static_cast<uint64_t>(world);
    return (all + ranks * kPadTo - 1) / (ranks * kPadTo) * kPadTo;
  }
  uint64_t padding(int world) const {
    uint64_t elements = shard(world) * static_cast<uint64_t>(world);
    for (const ModelParam& p : model_.params) elements -= p.numel();
    return elements;
  }
  uint64_t width() const { return GetParam().dtype == STRATA_BF16 ? 2 : 4; }

  // The fetched weights are those that read gives; then the padding of the flat buffer they lie in is NaN.
  void check_views(strata_engine* e, int world, bool poisons) {
    ASSERT_EQ(strata_fetch(e, 0, nullptr), STRATA_OK) << last();
    char* first = nullptr;
    for (strata_param k = 0; k < model_.params.size(); ++k) {
      strata_tensor view;
      STRATA_INIT(&view);
      ASSERT_EQ(strata_param_view(e, k, &view), STRATA_OK) << last();
      if (k == 0) first = static_cast<char*>(view.data);
      std::vector<float> values(model_.params[k].numel());
      const strata_tensor out = tensor_of(values, model_.params[k].shape);
      ASSERT_EQ(strata_read_param(e, k, "weight", &out), STRATA_OK) << last();
      for (uint64_t i = 0; i < values.size(); ++i) {
        uint32_t bits = 0, read_bits;
        std::memcpy(reinterpret_cast<char*>(&bits) + 4 - width(), static_cast<char*>(view.data) + i * width(), width());
        std::memcpy(&read_bits, &values[i], 4);
        ASSERT_EQ(bits, read_bits) << model_.params[k].name << "[" << i << "]";
      }
    }
    if (poisons) {
      EXPECT_EQ(poison(first, shard(world) * static_cast<uint64_t>(world), width()), padding(world));
    }
    ASSERT_EQ(strata_release(e, 0, nullptr), STRATA_OK) << last();
  }

  // The same gradients on every rank, whose mean is that of world 1; squares that add up exactly in any order. Reads
  // the sums back.
  void give_gradients(strata_engine* e, int step, Gpu* gpu, Result* out) {
    std::vector<std::vector<float>> kept;
    for (strata_param k = 0; k < model_.params.size(); ++k) {
      std::vector<float>& g = kept.emplace_back(model_.params[k].numel());
      for (uint64_t i = 0; i < g.size(); ++i) g[i] = 0.5f + static_cast<float>((7 * i + 3 * k) % 100) / 256;
      const std::vector<int64_t>& shape = model_.params[k].shape;
      const strata_tensor t = gpu ? gpu->tensor(g, shape, gpu->stream()) : tensor_of(g, shape);
      ASSERT_EQ(strata_grad(e, k, &t, gpu ? gpu->stream() : nullptr), STRATA_OK) << last();
    }
    ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
    for (strata_param k = 0; k < model_.params.size(); ++k) {
      std::vector<float>& sum = out->weights["gradient of " + model_.params[k].name + std::to_string(step)];
      sum.resize(model_.params[k].numel());
      const strata_tensor t = tensor_of(sum, model_.params[k].shape);
      ASSERT_EQ(strata_read_param(e, k, "grad", &t), STRATA_OK) << last();
      for (float& value : sum) value /= static_cast<float>(strata_world(e));  // by a power of two
    }
  }

  // Every array after some steps, and again after a load of a checkpoint of it.
  void train(int rank, strata_engine* e, Gpu* gpu, const Trial& t, bool poisons, Result* out) {
    ASSERT_EQ(build_model(e, model_), "");
    for (int step = 1; step <= kSteps; ++step) {
      if (!gpu) check_views(e, t.world, poisons && step > 1);
      give_gradients(e, step, gpu, out);
      ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
      strata_step_info info;
      STRATA_INIT(&info);
      ASSERT_EQ(strata_get_step_info(e, &info), STRATA_OK) << last();
      EXPECT_EQ(info.was_applied, 1u);
      EXPECT_LT(info.clip_factor, 1.0);
      out->norms.push_back(info.grad_norm);
      ASSERT_EQ(strata_wait(e), STRATA_OK) << last();
      if (poisons) poison_tiers(rank, t);
    }
    if (!gpu) check_views(e, t.world, poisons);
    ASSERT_EQ(collect(e, model_, out), "");
    const std::string folder = dir_.path + "/world" + std::to_string(t.world);
    ASSERT_EQ(strata_export_weights(e, (folder + ".weights").c_str()), STRATA_OK) << last();
    ASSERT_EQ(strata_save(e, folder.c_str(), "t"), STRATA_OK) << last();
    if (poisons) poison_tiers(rank, t);
    ASSERT_EQ(strata_load(e, folder.c_str(), "t"), STRATA_OK) << last();
    Result loaded;
    ASSERT_EQ(collect(e, model_, &loaded), "");
    for (const auto& [name, values] : loaded.weights) EXPECT_EQ(values, out->weights[name]) << name;
    EXPECT_EQ(loaded.master, out->master);
    EXPECT_EQ(loaded.exp_avg, out->exp_avg);
    EXPECT_EQ(loaded.exp_avg_sq, out->exp_avg_sq);
  }

  // No rank is inside of a call meanwhile.
  void poison_tiers(int rank, const Trial& t) {
    together_.arrive_and_wait();
    if (rank == 0) {
      const auto ranks = static_cast<uint64_t>(t.world), owners = t.stage == 0 ? 1 : ranks;
      Poisoned poisoned{shard(t.world) * ranks / owners};
      for_each_piece()(&poisoned, poison_piece);
      EXPECT_GE(poisoned.pieces, 4 * ranks);
      EXPECT_EQ(poisoned.padding, poisoned.pieces / owners * padding(t.world));
    }
    together_.arrive_and_wait();
  }

  Result trained(int world, bool poisons) {
    Trial t = trial(world);
    Result result;
    const auto body = [&](int rank, strata_engine* e, Gpu* gpu) {
      Result mine;
      train(rank, e, gpu, t, poisons, &mine);
      if (poisons) together_.arrive_and_drop();  // nobody waits for a rank that failed
      if (rank == 0) result = mine;
    };
    if (GetParam().gpu) {
      t.gpu_body = body;
    } else {
      t.body = [&](int rank, strata_engine* e) { body(rank, e, nullptr); };
    }
    EXPECT_EQ(run(t).error, "");
    return result;
  }

  Model model_;
  std::barrier<> together_{4};
  DiskDir dir_;
};

TEST_P(PaddingIsNaN, AndTheNumbersAreThoseOfWorld1) {
  const Result plain = trained(1, false), padded = trained(4, true);
  EXPECT_EQ(padded.norms, plain.norms);
  EXPECT_TRUE(padded == plain);
  for (const auto* arrays : {&padded.weights, &padded.master, &padded.exp_avg, &padded.exp_avg_sq}) {
    for (const auto& [name, values] : *arrays)
      EXPECT_THAT(values, testing::Each(testing::Not(testing::IsNan()))) << name;
  }
  EXPECT_EQ(contents(dir_.path + "/world4.weights"), contents(dir_.path + "/world1.weights"));
  const std::string nan16(reinterpret_cast<const char*>(&kNaN16), 2), nan32(reinterpret_cast<const char*>(&kNaN32), 4);
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(dir_.path)) {
    if (!entry.is_regular_file()) continue;
    ++files;
    const std::string bytes = contents(entry.path());
    EXPECT_EQ(bytes.find(nan32 + nan32), bytes.npos) << entry.path();
    EXPECT_EQ(bytes.find(nan16 + nan16 + nan16 + nan16), bytes.npos) << entry.path();
  }
  EXPECT_GE(files, 2 + 4 + 1);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const std::vector<int64_t> small = {5, 7, 3};           // all in rank 0's shard
  const std::vector<int64_t> large = {2051, 4093, 1003};  // over those of all ranks
  for (const int stage : {0, 1, 2, 3}) {
    for (const bool gpu : {false, true}) {
      for (const strata_dtype dtype : {STRATA_F32, STRATA_BF16}) {
        for (const auto& sizes : {small, large}) {
          const std::string name = "stage" + std::to_string(stage) + (dtype == STRATA_F32 ? "_fp32_" : "_bf16_") +
                                   std::to_string(sizes[0]) + (gpu ? "_gpu" : "");
          all.push_back({name, stage, dtype, sizes, gpu});
        }
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Matrix, PaddingIsNaN, testing::ValuesIn(cases()),
                         [](const auto& of) { return of.param.name; });

}  // namespace
}  // namespace strata::test
