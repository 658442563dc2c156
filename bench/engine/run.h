// run.h - an engine for benches: units of one bf16 matrix each, with a step that computes nothing but the update.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "strata/strata.h"

namespace strata::bench {

inline void check(strata_status status, const char* what) {
  if (status == STRATA_OK) return;
  std::fprintf(stderr, "%s: %s\n", what, strata_last_error());
  std::exit(1);
}

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Units of one bf16 matrix each.
struct Run {
  strata_engine* engine = nullptr;
  std::vector<int64_t> shape;
  std::vector<uint16_t> grad;
  uint32_t units;

  // What most runs here have alike.
  struct Shape {
    std::string offload = "device = \"cpu\"\n";  // lines of offload_optimizer; none: not offloaded
    uint32_t units = 8;
    int64_t side = 2048;
    uint32_t threads = 1;       // workers; 0: the engine decides
    std::string zero = "";      // further lines of zero_optimization
    std::string sections = "";  // further ones
  };
  Run(int rank, int world, const std::string& job, int stage, const Shape& s)
      : shape{s.side, s.side}, grad(static_cast<size_t>(s.side * s.side), 0x3c00), units(s.units) {
    const std::string manifest =
        "train_micro_batch_size_per_gpu = 1\ngradient_accumulation_steps = 1\nlog_level = \"warn\"\n" +
        (s.threads == 0 ? "" : "threads = " + std::to_string(s.threads) + "\n") +
        "[zero_optimization]\nstage = " + std::to_string(stage) +
        (stage == 3 ? "\nparam_persistence_threshold = 0\n" : "\n") + s.zero +
        (s.offload.empty() ? "" : "[zero_optimization.offload_optimizer]\n" + s.offload) + s.sections;
    strata_engine_args args;
    STRATA_INIT(&args);
    args.manifest_text = manifest.c_str();
    args.threads = 1;
    args.rank = rank;
    args.world = world;
    args.job = job.c_str();
    check(strata_open(&args, &engine), "open");
    for (uint32_t u = 0; u < units; ++u) {
      strata_unit unit;
      check(strata_add_unit(engine, ("unit" + std::to_string(u)).c_str(), &unit), "add_unit");
      strata_param_args p;
      STRATA_INIT(&p);
      const std::string name = "w" + std::to_string(u);
      p.name = name.c_str();
      p.shape = shape.data();
      p.ndim = 2;
      p.dtype = STRATA_BF16;
      strata_param id;
      check(strata_add_param(engine, unit, &p, &id), "add_param");
    }
  }
  ~Run() { strata_close(engine); }
  Run(const Run&) = delete;

  void gradients() {
    for (uint32_t u = 0; u < units; ++u) {
      check(strata_fetch(engine, u, nullptr), "fetch");
      check(strata_release(engine, u, nullptr), "release");
    }
    strata_tensor t;
    STRATA_INIT(&t);
    t.data = grad.data();
    t.device_type = STRATA_CPU;
    t.dtype = STRATA_BF16;
    t.ndim = 2;
    t.shape = shape.data();
    for (uint32_t u = units; u-- > 0;) {
      check(strata_fetch(engine, u, nullptr), "fetch");
      check(strata_grad(engine, u, &t, nullptr), "grad");
      check(strata_release(engine, u, nullptr), "release");
      check(strata_grads_done(engine, u), "grads_done");
    }
    check(strata_end_backward(engine), "end_backward");
  }
  void update() {
    check(strata_step(engine, nullptr), "step");
    check(strata_wait(engine), "wait");
  }
  void step() {
    gradients();
    update();
  }
};

}  // namespace strata::bench
