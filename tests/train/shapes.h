// shapes.h - the stages, worlds and micro-batches that matrices of tests go over, with where the optimizer state is.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "tests/train/harness.h"

namespace strata::test {

struct Shape {
  int stage, world, micro;
  double clip;
  std::string offload;
};

inline std::string shape_name(const testing::TestParamInfo<Shape>& info) {
  const Shape& s = info.param;
  return "stage" + std::to_string(s.stage) + "_world" + std::to_string(s.world) + "_micro" + std::to_string(s.micro) +
         (s.clip > 0 ? "_clip" : "") + "_" + s.offload;
}

inline Trial trial_of(const Shape& s) {
  Trial t;
  t.name = shape_name({s, 0});
  t.stage = s.stage;
  t.world = s.world;
  t.micro_batches = s.micro;
  t.clip = s.clip;
  t.offload_optimizer = s.offload;
  if (s.stage == 3) t.overrides = {"zero_optimization.param_persistence_threshold=50"};
  return t;
}

}  // namespace strata::test
