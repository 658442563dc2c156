// generate.cc - see generate.h.
#include "generate.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "data.h"

namespace gpt {
namespace {

// One tensor of the file, widened to fp32. `data` is where the file's tensor bytes start.
std::vector<float> read_tensor(std::ifstream* file, uint64_t data, const std::string& name,
                               const nlohmann::json& entry) {
  const uint64_t begin = entry.at("data_offsets").at(0), end = entry.at("data_offsets").at(1);
  const std::string dtype = entry.at("dtype");
  if (dtype != "BF16" && dtype != "F32") throw std::runtime_error(name + " has dtype " + dtype + ", not BF16 or F32");
  std::string bytes(end - begin, '\0');
  file->seekg(std::streamoff(data + begin));
  if (!file->read(bytes.data(), std::streamsize(bytes.size())))
    throw std::runtime_error("the data ends inside " + name);
  const size_t size = dtype == "F32" ? 4 : 2;
  std::vector<float> values(bytes.size() / size);
  for (size_t i = 0; i < values.size(); ++i) {  // bf16 is the upper half of fp32 (little-endian)
    char word[4] = {};
    std::memcpy(word + 4 - size, bytes.data() + i * size, size);
    std::memcpy(&values[i], word, 4);
  }
  return values;
}

// Probabilities of the byte after `text`, which is at most a context long.
const Real* next_byte(Config c, const Weights& weights, const std::string& text, Scratch* scratch) {
  c.context = int(text.size());  // attention looks back only, so a short text needs no padding
  std::vector<Real> x(text.size() * size_t(c.dim));
  const auto units = model_units(c);
  std::vector<const Real*> w;
  for (size_t u = 0; u < units.size(); ++u) {
    w.clear();
    for (const ParamSpec& p : units[u].params) {
      w.push_back(weights.at(p.tied_to.empty() ? p.name : p.tied_to).data());
    }
    if (u == 0) {
      embed_forward(c, 1, reinterpret_cast<const uint8_t*>(text.data()), Embed<const Real>(w.data()), x.data());
    } else if (u + 1 < units.size()) {
      block_forward(c, 1, Block<const Real>(w.data()), x.data(), x.data(), scratch);
    } else {
      head_forward(c, c.context, Head<const Real>(w.data()), x.data(), scratch);
    }
  }
  return scratch->probability.data() + (text.size() - 1) * kVocabulary;
}

// p^(1 / temperature), normalized, at the point `uniform` of its cumulative sum.
int sample(const Real* probability, double temperature, double uniform) {
  if (temperature <= 0) return int(std::max_element(probability, probability + kVocabulary) - probability);
  double weight[kVocabulary], sum = 0;
  for (int i = 0; i < kVocabulary; ++i) sum += weight[i] = std::pow(double(probability[i]), 1 / temperature);
  double rest = uniform * sum;
  int byte = 0;
  while (byte < kVocabulary - 1 && (rest -= weight[byte]) >= 0) ++byte;
  return byte;
}

}  // namespace

Weights read_weight_file(const std::string& path, Config* config) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot open the weight file " + path);
  uint64_t length = 0;
  file.read(reinterpret_cast<char*>(&length), sizeof length);
  if (!file || length == 0 || length > (64u << 20)) throw std::runtime_error(path + " has no safetensors header");
  std::string text(length, '\0');
  if (!file.read(text.data(), std::streamsize(length))) throw std::runtime_error(path + " ends inside its header");
  try {
    const nlohmann::json header = nlohmann::json::parse(text);
    config->dim = header.at("embed.position").at("shape").at(1);
    config->context = header.at("embed.position").at("shape").at(0);
    if (config->dim <= 0 || config->dim % kHeadDim != 0 || config->context <= 0) {
      throw std::runtime_error("embed.position has an impossible shape");
    }
    config->layers = 0;
    while (header.contains("block" + std::to_string(config->layers) + ".qkv")) ++config->layers;
    Weights weights;
    for (const UnitSpec& unit : model_units(*config)) {
      for (const ParamSpec& p : unit.params) {
        if (!p.tied_to.empty()) continue;
        const nlohmann::json& entry = header.at(p.name);
        if (entry.at("shape") != nlohmann::json(p.shape)) throw std::runtime_error(p.name + " has another shape");
        weights[p.name] = read_tensor(&file, sizeof length + length, p.name, entry);
        if (int64_t(weights[p.name].size()) != p.elements()) throw std::runtime_error(p.name + " has another size");
      }
    }
    return weights;
  } catch (const std::exception& e) {
    throw std::runtime_error("reading weights from " + path + ": " + e.what());
  }
}

void generate(const Config& config, const Weights& weights, const Sampling& sampling,
              const std::function<void(char)>& emit) {
  std::string text = sampling.prompt.empty() ? "\n" : sampling.prompt;
  Scratch scratch(config, 1);
  for (int i = 0; i < sampling.bytes; ++i) {
    const size_t seen = std::min(text.size(), size_t(config.context));
    const Real* p = next_byte(config, weights, text.substr(text.size() - seen), &scratch);
    const uint64_t stream = stream_of("generate");
    text.push_back(char(sample(p, sampling.temperature, random_uniform(sampling.seed, stream, uint64_t(i)))));
    emit(text.back());
  }
}

}  // namespace gpt
