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

// Unit k's only param, fetched, and its gradient on the GPU's stream, 1 more than the weight; nobody waits.
inline void give_gradient_on(Gpu& gpu, strata_engine* e, const Model& m, size_t k) {
  const auto id = static_cast<uint32_t>(k);
  strata_tensor view;
  STRATA_INIT(&view);
  ASSERT_EQ(strata_fetch(e, id, gpu.stream()), STRATA_OK) << last();
  ASSERT_EQ(strata_param_view(e, id, &view), STRATA_OK) << last();
  const strata_tensor gradient = gpu.gradient(view, std::vector<float>(m.params[k].numel(), 1.0f));
  ASSERT_EQ(strata_grad(e, id, &gradient, gpu.stream()), STRATA_OK) << last();
  ASSERT_EQ(strata_release(e, id, gpu.stream()), STRATA_OK) << last();
}

// A step whose arguments are not the same on all ranks returns, and is then refused by this word.
inline void expect_step_refused(strata_engine* e, const strata_step_args& args, const std::string& word) {
  const Model m = vectors({9});
  ASSERT_EQ(build_model(e, m), "");
  give_gradient(e, m, 0, 2);
  ASSERT_EQ(strata_end_backward(e), STRATA_OK);
  ASSERT_EQ(strata_step(e, &args), STRATA_OK) << last();
  EXPECT_EQ(strata_wait(e), STRATA_FAILED_PRECONDITION);
  EXPECT_TRUE(says(word)) << last();
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
