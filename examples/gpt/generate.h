// generate.h - text from trained weights. Needs no engine: whole weights in fp32, by name.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "model.h"

namespace gpt {

using Weights = std::map<std::string, std::vector<float>>;

// Reads a consolidated weight file (strata_export_weights). The file is HDF5 and, from its first byte, also a valid
// safetensors file: an 8-byte header length, a JSON header with every tensor's place, then bytes. So no HDF5 is
// needed here. The model's size follows from the shapes.
Weights read_weight_file(const std::string& path, Config* config);

struct Sampling {
  std::string prompt;
  int bytes;           // how many to generate
  double temperature;  // 0: always the likeliest byte
  uint64_t seed;
};

// Calls `emit` with each new byte.
void generate(const Config& config, const Weights& weights, const Sampling& sampling,
              const std::function<void(char)>& emit);

}  // namespace gpt
