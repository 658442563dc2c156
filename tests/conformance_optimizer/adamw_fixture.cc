// adamw_fixture.cc - see adamw_fixture.h.
#include "tests/conformance_optimizer/adamw_fixture.h"

#include <gtest/gtest.h>

#include <bit>

namespace strata::test {

std::string name(const Kind& kind) {
  const auto dtype = [](strata_dtype d) { return d == STRATA_F32 ? "f32" : d == STRATA_BF16 ? "bf16" : "f16"; };
  return std::string("grad ") + dtype(kind.grad) + ", weight " + dtype(kind.weight) +
         (kind.split ? ", split" : ", whole");
}

const std::vector<Kind>& all_kinds() {
  static const std::vector<Kind> kinds = [] {
    std::vector<Kind> all;
    for (const strata_dtype grad : {STRATA_F32, STRATA_BF16, STRATA_F16}) {
      for (const strata_dtype weight : {STRATA_F32, STRATA_BF16, STRATA_F16}) {
        all.push_back({grad, weight, false});
        if (weight != STRATA_F16) all.push_back({grad, weight, true});
      }
    }
    return all;
  }();
  return kinds;
}

const std::vector<std::string>& isas() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all = {"scalar"};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) all.push_back("avx2");
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      all.push_back("avx512");
    }
#endif
    return all;
  }();
  return names;
}

uint32_t bytes_of(strata_dtype dtype) { return dtype == STRATA_F32 ? 4 : 2; }

Array::Array(strata_dtype dtype, uint64_t count, uint64_t shift)
    : dtype_(dtype), count_(count), storage_((count + shift) * bytes_of(dtype) + 64) {
  const auto address = reinterpret_cast<uintptr_t>(storage_.data());
  data_ = storage_.data() + (64 - address % 64) % 64 + shift * bytes_of(dtype);
}

Data::Data(const Kind& k, uint64_t n, uint64_t shift)
    : kind(k), count(n), grad(k.grad, n, shift), weight(k.weight, n, shift) {
  if (!k.split) state.emplace_back(STRATA_F32, n, shift);
  if (k.split && k.weight == STRATA_BF16) state.emplace_back(STRATA_U16, n, shift);
  state.emplace_back(STRATA_F32, n, shift);
  state.emplace_back(STRATA_F32, n, shift);
  for (Array& a : state) pointers.push_back(a.data());
}

std::vector<std::vector<char>> Data::bytes() const {
  std::vector<std::vector<char>> all = {weight.copy()};
  for (const Array& a : state) all.push_back(a.copy());
  return all;
}

void Data::assign(const Data& from) {
  grad.assign(from.grad.copy());
  weight.assign(from.weight.copy());
  for (size_t k = 0; k < state.size(); ++k) state[k].assign(from.state[k].copy());
}

namespace {

uint16_t ordinary16(strata_dtype dtype, std::mt19937& random) {
  const uint16_t sign = static_cast<uint16_t>((random() & 1) << 15);
  if (dtype == STRATA_BF16) return sign | static_cast<uint16_t>(0x3A00 + random() % 0x400);
  return sign | static_cast<uint16_t>(0x1000 + random() % 0x1C00);
}

}  // namespace

void fill_ordinary(Data& data, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (uint64_t i = 0; i < data.count; ++i) {
    if (data.kind.grad == STRATA_F32) data.grad.as<float>()[i] = 0.01f * normal(random);
    if (data.kind.grad != STRATA_F32) data.grad.as<uint16_t>()[i] = ordinary16(data.kind.grad, random);
    const float master = 0.05f * normal(random);
    if (data.kind.weight == STRATA_F32) data.weight.as<float>()[i] = master;
    if (data.kind.weight != STRATA_F32) data.weight.as<uint16_t>()[i] = static_cast<uint16_t>(bits(master) >> 16);
    const size_t moments = data.state.size() - 2;
    if (!data.kind.split) data.state[0].as<float>()[i] = master;
    if (moments == 1 && data.kind.split) data.state[0].as<uint16_t>()[i] = static_cast<uint16_t>(random() & 0x7FFF);
    data.state[moments].as<float>()[i] = 0.005f * normal(random);
    const float root = 0.01f * normal(random);
    data.state[moments + 1].as<float>()[i] = root * root;
  }
}

void fill_any_bits(Data& data, uint32_t seed) {
  static const uint32_t special[] = {
      0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x3F800000, 0xBF800000,
      0x3F808000, 0x3F807FFF, 0x3F808001, 0x3F818000, 0xBF808000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF,
      0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x477FE000, 0x477FEFFF,
      0x477FF000, 0x47800000, 0x387FC000, 0x387FE000, 0x38800000, 0x33000000, 0x33000001, 0x32FFFFFF, 0x33800000};
  std::mt19937 random(seed);
  const auto any = [&]() -> uint32_t {
    const uint32_t pick = random() % 8;
    if (pick == 0) return special[random() % std::size(special)];
    if (pick < 3) return bits(0.01f * static_cast<float>(static_cast<int32_t>(random())) / 2147483648.0f);
    if (pick == 3) return random() & 0x80FFFFFF;  // around the smallest normal number
    return random();
  };
  const auto fill = [&](Array& a, bool wide) {
    for (uint64_t i = 0; i < data.count; ++i) {
      if (wide) a.as<uint32_t>()[i] = any();
      if (!wide) a.as<uint16_t>()[i] = static_cast<uint16_t>(random() % 4 ? random() : any() >> 16);
    }
  };
  fill(data.grad, data.kind.grad == STRATA_F32);
  fill(data.weight, data.kind.weight == STRATA_F32);
  for (Array& a : data.state) fill(a, a.bytes() == data.count * 4);
}

strata_optim_group group(double lr, double beta1, double beta2, double eps, double decay) {
  return {sizeof(strata_optim_group), STRATA_ABI_MINOR, lr, beta1, beta2, eps, decay};
}

Adamw::Adamw(Options options, const strata_host* host) : Adamw("optim_adamw", std::move(options), host) {}

Adamw::Adamw(const std::string& plugin, Options options, const strata_host* host)
    : api(load<strata_optimizer_api>(plugin, STRATA_OPTIMIZER)) {
  strata_open_args a = rank.args(&options);
  if (host != nullptr) a.host = host;
  const Status status = take_failure(api->open(&a, &self));
  EXPECT_TRUE(status.ok()) << status.text();
}

Adamw::~Adamw() {
  if (self != nullptr) api->close(self);
}

std::vector<float> Adamw::scalars(const strata_optim_group& g, uint64_t step) {
  std::vector<float> out(STRATA_OPTIM_SCALARS, -1);
  const Status status = take_failure(api->scalars(self, &g, step, out.data()));
  EXPECT_TRUE(status.ok()) << status.text();
  return out;
}

strata_optim_args Adamw::args(Data& data, const std::vector<float>& scalars,
                              const std::vector<strata_optim_span>& spans) {
  spans_ = spans.empty() ? std::vector<strata_optim_span>{{0, data.count, 0, 0}} : spans;
  strata_optim_args a{};
  a.struct_size = sizeof(a);
  a.spans = spans_.data();
  a.span_count = spans_.size();
  a.span_stride = sizeof(strata_optim_span);
  a.scalars = scalars.data();
  a.scalar_sets = scalars.size() / STRATA_OPTIM_SCALARS;
  a.grad = data.grad.data();
  a.grad_dtype = data.kind.grad;
  a.weight_dtype = data.kind.weight;
  a.weight = data.weight.data();
  a.state = data.pointers.data();
  a.grad_scale = &scale_;
  return a;
}

void Adamw::step(Data& data, const std::vector<float>& scalars, const std::vector<strata_optim_span>& spans,
                 float grad_scale) {
  scale_ = grad_scale;
  const strata_optim_args a = args(data, scalars, spans);
  const Status status = take_failure(api->step(self, &a, nullptr));
  EXPECT_TRUE(status.ok()) << status.text();
}

std::vector<float> Adamw::canonical(Data& data, uint32_t index) {
  std::vector<float> out(data.count);
  const strata_optim_args a = args(data, {});
  const Status status = take_failure(api->export_array(self, &a, index, out.data()));
  EXPECT_TRUE(status.ok()) << status.text();
  return out;
}

void Adamw::import_canonical(Data& data, uint32_t index, const std::vector<float>& values) {
  const strata_optim_args a = args(data, {});
  const Status status = take_failure(api->import_array(self, &a, index, values.data()));
  EXPECT_TRUE(status.ok()) << status.text();
}

Options options_for(const Kind& kind, const std::string& isa, bool decoupled) {
  return Options().set("layout", kind.split ? "split" : "whole").set("isa", isa).set("decoupled", decoupled);
}

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
float from_bits(uint32_t x) { return std::bit_cast<float>(x); }
std::vector<uint32_t> bits(const std::vector<float>& values) {
  std::vector<uint32_t> out;
  for (const float x : values) out.push_back(bits(x));
  return out;
}

}  // namespace strata::test
