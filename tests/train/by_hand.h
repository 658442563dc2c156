// by_hand.h - for tests that make the calls of strata.h themselves instead of running the harness's loop.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/train/harness.h"

namespace strata::test {

inline std::string last() { return strata_last_error(); }
inline bool says(const std::string& part) { return last().find(part) != std::string::npos; }

// fp32, in CPU memory; shape and data stay the caller's.
inline strata_tensor tensor_of(std::vector<float>& data, const std::vector<int64_t>& shape) {
  strata_tensor t;
  STRATA_INIT(&t);
  t.data = data.data();
  t.device_type = STRATA_CPU;
  t.dtype = STRATA_F32;
  t.ndim = static_cast<int32_t>(shape.size());
  t.shape = shape.data();
  return t;
}

// A model of vectors, one per unit.
inline Model vectors(const std::vector<int64_t>& sizes, strata_dtype dtype = STRATA_F32) {
  Model m;
  for (size_t k = 0; k < sizes.size(); ++k) {
    m.units.push_back("u" + std::to_string(k));
    m.params.push_back({"p" + std::to_string(k), {sizes[k]}, dtype, static_cast<int>(k), 0, false, -1});
  }
  return m;
}

inline void give_gradient(strata_engine* e, const Model& m, size_t k, float value) {
  std::vector<float> g(m.params[k].numel(), value);
  const strata_tensor t = tensor_of(g, m.params[k].shape);
  ASSERT_EQ(strata_grad(e, static_cast<strata_param>(k), &t, nullptr), STRATA_OK) << last();
}

// The body runs on every rank, and says itself what must hold there.
inline void run_body(Trial t, std::function<void(int, strata_engine*)> body) {
  t.body = std::move(body);
  const Result r = run(t);
  if (t.world == 1) {
    EXPECT_EQ(r.error, "");
  }
}

}  // namespace strata::test
