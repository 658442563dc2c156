// data.cc - see data.h.
#include "data.h"

#include <cmath>
#include <fstream>
#include <iterator>
#include <numbers>
#include <stdexcept>

namespace gpt {

uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index) {
  uint64_t x = 0;
  for (uint64_t part : {seed, stream, index}) {  // splitmix64, one round per part
    x = (x ^ part) + 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    x ^= x >> 31;
  }
  return x;
}

double random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  return (double(random_bits(seed, stream, index) >> 11) + 0.5) / double(1ull << 53);
}

double random_normal(uint64_t seed, uint64_t stream, uint64_t index) {  // Box-Muller
  const double radius = std::sqrt(-2 * std::log(random_uniform(seed, stream, 2 * index)));
  return radius * std::cos(2 * std::numbers::pi * random_uniform(seed, stream, 2 * index + 1));
}

uint64_t stream_of(const std::string& name) {
  uint64_t x = 0;
  for (char c : name) x = random_bits(x, 0, uint8_t(c));
  return x;
}

Text::Text(const std::string& path, int context) : context_(uint64_t(context)) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot open the text " + path + " (see --text)");
  bytes_.assign(std::istreambuf_iterator<char>(file), {});
  train_ = bytes_.size() / 20 * 19;
  if (bytes_.size() - train_ <= context_ + 1) {
    throw std::runtime_error("the text " + path + " has " + std::to_string(bytes_.size()) +
                             " bytes; the held-out twentieth must be longer than the context of " +
                             std::to_string(context_));
  }
}

void Text::append(uint64_t at, std::vector<uint8_t>* input, std::vector<uint8_t>* target) const {
  const auto* from = reinterpret_cast<const uint8_t*>(bytes_.data()) + at;
  input->insert(input->end(), from, from + context_);
  target->insert(target->end(), from + 1, from + 1 + context_);
}

void Text::train_sample(uint64_t seed, uint64_t step, uint64_t sample, std::vector<uint8_t>* input,
                        std::vector<uint8_t>* target) const {
  append(random_bits(seed, step, sample) % (train_ - context_), input, target);
}

void Text::held_out_sample(uint64_t sample, uint64_t count, std::vector<uint8_t>* input,
                           std::vector<uint8_t>* target) const {
  const uint64_t room = bytes_.size() - train_ - context_;
  append(train_ + room * sample / count, input, target);
}

}  // namespace gpt
