// harness.h - trains a small made-up model through strata.h, with the ranks as threads, and returns what came out.
//
// The model has no forward pass: the gradient of element i of a param is its weight plus a smooth function of
// (step, micro-batch, rank, param, i). That exercises every path of the engine and is easy to do without it
// (reference.h). Its params are the odd cases: tied, frozen, empty, scalar, tiny, uneven, two groups, two dtypes.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "strata/strata.h"
#include "tests/train/gpu.h"

namespace strata::test {

struct ModelParam {
  std::string name;
  std::vector<int64_t> shape;
  strata_dtype dtype = STRATA_BF16;
  int unit = 0;
  int group = 0;  // 1: no weight decay, half the learning rate
  bool frozen = false;
  int tied_to = -1;
  uint64_t numel() const;
};

struct Model {
  std::vector<std::string> units;
  std::vector<ModelParam> params;
};
Model odd_model();

struct Trial {
  std::string name = "";
  int world = 1;
  int stage = 0;
  int micro_batches = 1;
  double clip = 0;
  std::string offload_optimizer = "none", offload_param = "none";
  std::vector<std::string> overrides = {};  // further manifest settings
  std::string manifest_extra = "";          // further manifest text ([plugin.x] sections)
  int steps = 4;
  std::string gpu = "";         // "gpu_sim": simulated GPUs (tests/gpu_sim); "device_cuda": real ones
  bool device_updates = false;  // the GPU has a part in the update of offloaded state
  bool lend = false;            // the host lends the memory of gradients
  int gpu_delay_us = 0;         // work of simulated ones is late by up to this
  Model model = odd_model();
  uint32_t skip_unit = UINT32_MAX;  // a unit that odd steps leave out: no fetch, no gradient
  bool change_settings = false;     // steps give the groups settings of their own: step_settings
  // Of each rank, from any thread, when given; from "warn" on, if no override says otherwise.
  std::function<void(strata_log_level, const std::string&)> log = {};
  // Called on each rank in place of the standard loop, when given.
  std::function<void(int rank, strata_engine*)> body = {};
  std::function<void(int rank, strata_engine*, Gpu*)> gpu_body = {};  // or this
};

// Everything bit by bit: params by name, their arrays, norms per step.
struct Result {
  std::map<std::string, std::vector<float>> weights, master, exp_avg, exp_avg_sq;
  std::vector<double> norms;
  strata_counters counters{};
  int loans = 0;      // blocks of memory the engine borrowed
  std::string error;  // the first failing call of any rank, with its text
  bool operator==(const Result& o) const;
};

float initial_value(size_t param, uint64_t i);
// Added to the weight, it is the gradient.
float gradient_noise(int step, int micro, int rank, size_t param, uint64_t i);

// Of the two groups of odd_model, from step 2 on; NaN: what the group has.
std::array<strata_group_args, 2> step_settings(int step);

// The manifest a trial runs with.
std::string manifest_of(const Trial& trial);
// Opens an engine for one rank of a trial, which outlives it where it has a `log`; on failure returns NULL and sets
// *error, and *code where it is given. `job` "": this process is the rank, and which one, its environment says.
strata_engine* open_rank(const Trial& trial, const std::string& job, int rank, std::string* error,
                         const strata_lender* gradient_memory = nullptr, strata_status* code = nullptr);
// Registers and commits the model and writes the initial values. Empty text when all went well.
std::string build_model(strata_engine* engine, const Model& model);
// One micro-batch: forward over all units, backward in reverse with a second fetch, gradients. On the CPU, or `gpu`.
std::string micro_batch(strata_engine* engine, const Model& model, int step, int micro, int rank, uint32_t skip_unit,
                        Gpu* gpu = nullptr);
// All arrays of all params into a result.
std::string collect(strata_engine* engine, const Model& model, Result* out);

// Runs a trial on `world` threads and returns rank 0's result; ranks must agree.
Result run(const Trial& trial);

}  // namespace strata::test
