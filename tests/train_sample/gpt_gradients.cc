// gpt_gradients.cc - loss and gradients of the sample's model for given weights, for a comparison from outside.
//
//     gpt_gradients LAYERS DIM CONTEXT BATCH IN OUT
//
// IN: all weights as float32 in the order of model_units(), tied ones included, then the input and the target bytes.
// OUT: the loss as float64, then all gradients as float32 in the same order. Without IN and OUT it lists the params:
// one "name elements" per line.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "whole_model.h"

int main(int argc, char** argv) {
  if (argc != 5 && argc != 7) {
    std::fprintf(stderr, "usage: gpt_gradients LAYERS DIM CONTEXT BATCH [IN OUT]\n");
    return 2;
  }
  const gpt::Config config{.layers = std::atoi(argv[1]), .dim = std::atoi(argv[2]), .context = std::atoi(argv[3])};
  const int batch = std::atoi(argv[4]);
  gpt::test::WholeModel model(config, batch);
  if (argc == 5) {
    for (const gpt::UnitSpec& unit : model.units()) {
      for (const gpt::ParamSpec& p : unit.params) std::printf("%s %lld\n", p.name.c_str(), (long long)p.elements());
    }
    return 0;
  }
  std::vector<float> weights(model.size()), gradients;
  gpt::test::Sample sample{batch, {}, {}};
  sample.input.resize(size_t(batch * config.context));
  sample.target.resize(sample.input.size());
  std::ifstream in(argv[5], std::ios::binary);
  in.read(reinterpret_cast<char*>(weights.data()), std::streamsize(weights.size() * sizeof(float)));
  in.read(reinterpret_cast<char*>(sample.input.data()), std::streamsize(sample.input.size()));
  in.read(reinterpret_cast<char*>(sample.target.data()), std::streamsize(sample.target.size()));
  if (!in) {
    std::fprintf(stderr, "gpt_gradients: %s is shorter than the model needs\n", argv[5]);
    return 1;
  }
  const double loss = model.loss_and_gradients(weights, sample, &gradients);
  std::ofstream out(argv[6], std::ios::binary);
  out.write(reinterpret_cast<const char*>(&loss), sizeof loss);
  out.write(reinterpret_cast<const char*>(gradients.data()), std::streamsize(gradients.size() * sizeof(float)));
  return out.flush() ? 0 : 1;
}
