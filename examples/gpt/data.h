// data.h - the text, the batches taken from it, and the random numbers of a run.
//
// Everything random is a pure function of what it is for (seed, step, sample; or seed, param, element), never of a
// generator's history: any rank can make any part of it, a resumed run continues exactly, and the global batch of a
// step is the same for every world size.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gpt {

// A well-mixed 64-bit number from three.
uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index);
double random_uniform(uint64_t seed, uint64_t stream, uint64_t index);  // in (0, 1)
double random_normal(uint64_t seed, uint64_t stream, uint64_t index);   // mean 0, deviation 1
// A stream number from a name.
uint64_t stream_of(const std::string& name);

class Text {
 public:
  // Reads the file; the last 5 % are held out for evaluation.
  Text(const std::string& path, int context);

  // Appends one sample: `context` bytes, and the same shifted by one.
  void train_sample(uint64_t seed, uint64_t step, uint64_t sample, std::vector<uint8_t>* input,
                    std::vector<uint8_t>* target) const;
  // Sample `sample` of `count` evenly spaced ones of the held-out part.
  void held_out_sample(uint64_t sample, uint64_t count, std::vector<uint8_t>* input,
                       std::vector<uint8_t>* target) const;

 private:
  void append(uint64_t at, std::vector<uint8_t>* input, std::vector<uint8_t>* target) const;

  std::string bytes_;
  uint64_t train_, context_;
};

}  // namespace gpt
