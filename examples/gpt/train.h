// train.h - training the GPT under Strata: the options, and the object that holds one rank's run.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "data.h"
#include "model.h"
#include "report.h"
#include "sharded.h"

namespace gpt {

struct Options {
  std::string manifest;
  std::vector<std::string> settings;  // "zero_optimization.stage=2": overrides of the manifest
  std::string size = "base", dtype, text = "kjv.txt";
  uint64_t steps = 100, warmup = 10, seed = 1;
  double lr = std::numeric_limits<double>::quiet_NaN();  // NaN: the manifest's
  int threads = 0;                                       // for matrix products; 0: cores / ranks
  std::string save, resume, tag, export_path;
  uint64_t save_every = 0, eval_every = 0, eval_samples = 32;
  bool eval_only = false, report_gather = false;
};

class Trainer {
 public:
  explicit Trainer(const Options& options);  // [collective]
  void run();                                // [collective] everything the options ask for

 private:
  double train_step(uint64_t step);
  double micro_batch();
  void forward_blocks(int batch);
  void load_batch(uint64_t step, int micro);
  double learning_rate(uint64_t step) const;
  double evaluate();
  void save(uint64_t step);
  void resume();

  Options options_;
  Config config_;
  Engine engine_;
  ShardedModel model_;
  Text text_;
  int rank_, world_, batch_, accumulation_;
  Report report_;
  uint64_t first_step_ = 0;  // of this run: 0, or where the checkpoint ended

  std::vector<uint8_t> input_, target_;  // [batch, context]
  std::vector<std::vector<Real>> x_;     // [layers + 1][batch, context, dim]: each block's input, then the head's
  std::vector<Real> dx_;                 // [batch, context, dim]: the gradient on its way down
  Scratch scratch_;
};

}  // namespace gpt
