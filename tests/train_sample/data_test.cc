// data_test.cc - batches, random numbers and weight files of the sample.
#include "data.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "generate.h"

namespace gpt::test {
namespace {

std::string write_file(const std::string& name, const std::string& bytes) {
  const std::string path = testing::TempDir() + "/" + name;
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

TEST(Random, HasTheMomentsOfItsDistribution) {
  double sum = 0, squares = 0;
  const int n = 200000;
  for (int i = 0; i < n; ++i) {
    const double x = random_normal(3, stream_of("a"), uint64_t(i));
    sum += x, squares += x * x;
  }
  EXPECT_NEAR(sum / n, 0, 0.01);
  EXPECT_NEAR(squares / n, 1, 0.02);
  EXPECT_NE(stream_of("block1.up"), stream_of("block11.up"));
}

TEST(Random, EveryPartOfTheKeyMatters) {
  std::set<uint64_t> seen;
  for (uint64_t seed : {0, 1, 2})
    for (uint64_t stream : {0, 1, 2})
      for (uint64_t index : {0, 1, 2}) seen.insert(random_bits(seed, stream, index));
  EXPECT_EQ(seen.size(), 27u);
}

TEST(Text, TargetsAreInputsShiftedAndTheLastTwentiethIsHeldOut) {
  std::string bytes;  // byte i tells where it is, in 16 bits
  for (int i = 0; i < 4000; ++i) bytes += char(i % 251);
  const std::string path = write_file("gpt_text.txt", bytes);
  const Text text(path, 16);
  std::set<int> firsts;
  for (uint64_t step = 0; step < 200; ++step) {
    std::vector<uint8_t> input, target;
    text.train_sample(5, step, 3, &input, &target);
    ASSERT_EQ(input.size(), 16u);
    ASSERT_EQ(target.size(), 16u);
    for (size_t i = 0; i + 1 < 16; ++i) EXPECT_EQ(target[i], input[i + 1]);
    firsts.insert(input[0]);
    std::vector<uint8_t> again_input, again_target;
    text.train_sample(5, step, 3, &again_input, &again_target);
    EXPECT_EQ(again_input, input);
  }
  EXPECT_GT(firsts.size(), 80u);

  std::vector<uint8_t> input, target;
  text.held_out_sample(0, 8, &input, &target);
  EXPECT_EQ(input[0], uint8_t(3800 % 251));  // the first byte no training sample can reach
  input.clear();
  text.held_out_sample(7, 8, &input, &target);
  EXPECT_EQ(input[0], uint8_t((3800 + (200 - 16) * 7 / 8) % 251));
}

TEST(Text, RefusesWhatItCannotUse) {
  EXPECT_THROW(Text("/no/such/file", 16), std::runtime_error);
  EXPECT_THROW(Text(write_file("gpt_short.txt", std::string(100, 'a')), 16), std::runtime_error);
}

// A weight file as the sample reads it: a safetensors header, a filler tensor, then data. Every value is `value(i)`.
std::string weight_file(const Config& config, const std::string& dtype) {
  nlohmann::json header;
  std::string data(24, 'x');
  header["hdf5.metadata"] = {{"dtype", "U8"}, {"shape", {24}}, {"data_offsets", {0, 24}}};
  for (const UnitSpec& unit : model_units(config)) {
    for (const ParamSpec& p : unit.params) {
      if (!p.tied_to.empty()) continue;
      const size_t begin = data.size();
      for (int64_t i = 0; i < p.elements(); ++i) {
        const float value = float(i % 64) / 128 - 0.25f;  // exact in bf16
        const char* b = reinterpret_cast<const char*>(&value);
        data.append(dtype == "F32" ? b : b + 2, dtype == "F32" ? 4 : 2);
      }
      header[p.name] = {{"dtype", dtype}, {"shape", p.shape}, {"data_offsets", {begin, data.size()}}};
    }
  }
  const std::string text = header.dump();
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + text + data;
}

class WeightFile : public testing::TestWithParam<std::string> {};

TEST_P(WeightFile, IsReadWholeAndGenerates) {
  const Config config{.layers = 2, .dim = 64, .context = 16};
  Config found;
  const Weights weights = read_weight_file(write_file("gpt_weights.h5", weight_file(config, GetParam())), &found);
  EXPECT_EQ(found.layers, 2);
  EXPECT_EQ(found.dim, 64);
  EXPECT_EQ(found.context, 16);
  EXPECT_EQ(weights.size(), 2u + 2 * 6 + 1);
  for (const auto& [name, values] : weights) {
    for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], float(i % 64) / 128 - 0.25f) << name << " " << i;
  }
  std::string texts[2];
  for (std::string& text : texts) {  // longer than the context, and the same for the same seed
    generate(found, weights, {.prompt = "a", .bytes = 40, .temperature = 1, .seed = 4}, [&](char c) { text += c; });
  }
  EXPECT_EQ(texts[0].size(), 40u);
  EXPECT_EQ(texts[0], texts[1]);
}
INSTANTIATE_TEST_SUITE_P(Dtypes, WeightFile, testing::Values("BF16", "F32"));

TEST(WeightFile, ABrokenOneIsAnErrorThatNamesTheFile) {
  const Config config{.layers = 1, .dim = 64, .context = 16};
  const std::string whole = weight_file(config, "BF16");
  const std::string cuts[] = {"", whole.substr(0, 4), whole.substr(0, 200), whole.substr(0, whole.size() - 1),
                              std::string(8, '\xff') + whole};
  for (const std::string& bytes : cuts) {
    const std::string path = write_file("gpt_broken.h5", bytes);
    Config found;
    try {
      read_weight_file(path, &found);
      ADD_FAILURE() << "a file of " << bytes.size() << " bytes was read";
    } catch (const std::runtime_error& e) {
      EXPECT_NE(std::string(e.what()).find(path), std::string::npos) << e.what();
    }
  }
}

}  // namespace
}  // namespace gpt::test
