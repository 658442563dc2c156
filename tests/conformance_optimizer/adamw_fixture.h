// adamw_fixture.h - an instance of an AdamW plugin and slices of data for it, with arrays at any element of a line.
#pragma once

#include <array>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "strata/iface/optimizer.h"
#include "tests/support/plugin_fixture.h"

namespace strata::test {

// A kind of slice: dtypes and layout, together one kernel.
struct Kind {
  strata_dtype grad, weight;
  bool split;
};
std::string name(const Kind& kind);
const std::vector<Kind>& all_kinds();    // 3 gradients x 5 forms
const std::vector<std::string>& isas();  // those this CPU can run, "scalar" first
uint32_t bytes_of(strata_dtype dtype);

// One array of a slice, `shift` elements behind a 64-byte boundary.
class Array {
 public:
  Array(strata_dtype dtype, uint64_t count, uint64_t shift = 0);
  void* data() { return data_; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }
  uint64_t bytes() const { return count_ * bytes_of(dtype_); }
  std::vector<char> copy() const { return {data_, data_ + bytes()}; }
  void assign(const std::vector<char>& from) { std::memcpy(data_, from.data(), bytes()); }

 private:
  strata_dtype dtype_;
  uint64_t count_;
  std::vector<char> storage_;
  char* data_;
};

// Everything a step reads and writes.
struct Data {
  Data(const Kind& kind, uint64_t count, uint64_t shift = 0);
  std::vector<std::vector<char>> bytes() const;  // weight and state
  void assign(const Data& from);                 // all bytes, the gradient too

  Kind kind;
  uint64_t count;
  Array grad, weight;
  std::vector<Array> state;
  std::vector<void*> pointers;
};

// Plain numbers as training has them; or any bits at all, with many zeros, subnormals, ties, infinities and NaN.
void fill_ordinary(Data& data, uint32_t seed);
void fill_any_bits(Data& data, uint32_t seed);

strata_optim_group group(double lr, double beta1, double beta2, double eps, double decay);

struct Adamw {
  explicit Adamw(Options options = {}, const strata_host* host = nullptr);
  Adamw(const std::string& plugin, Options options, const strata_host* host = nullptr);
  ~Adamw();
  Adamw(const Adamw&) = delete;

  std::vector<float> scalars(const strata_optim_group& g, uint64_t step);
  // One span over everything, unless `spans` are given.
  strata_optim_args args(Data& data, const std::vector<float>& scalars,
                         const std::vector<strata_optim_span>& spans = {});
  void step(Data& data, const std::vector<float>& scalars, const std::vector<strata_optim_span>& spans = {},
            float grad_scale = 1);
  std::vector<float> canonical(Data& data, uint32_t index);
  void import_canonical(Data& data, uint32_t index, const std::vector<float>& values);

  Rank rank;
  const strata_optimizer_api* api;
  strata_optim* self = nullptr;

 private:
  std::vector<strata_optim_span> spans_;
  float scale_ = 1;
};

Options options_for(const Kind& kind, const std::string& isa = "auto", bool decoupled = true);

uint32_t bits(float x);
float from_bits(uint32_t x);
std::vector<uint32_t> bits(const std::vector<float>& values);

}  // namespace strata::test
