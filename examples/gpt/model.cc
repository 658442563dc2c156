// model.cc - see model.h. Matrix products are BLAS calls; everything else is a plain loop over rows.
#include "model.h"

#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace gpt {
namespace {

constexpr Real kNormEpsilon = Real(1e-5);

// c[m, n] = alpha op(a) op(b) + beta c, with row strides.
struct Matrix {
  const Real* data;
  int stride;
  bool transposed = false;
};

void product(int m, int n, int k, Real alpha, Matrix a, Matrix b, Real beta, Real* c, int stride) {
  const auto ta = a.transposed ? CblasTrans : CblasNoTrans;
  const auto tb = b.transposed ? CblasTrans : CblasNoTrans;
  if constexpr (sizeof(Real) == sizeof(float)) {
    cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, alpha, reinterpret_cast<const float*>(a.data), a.stride,
                reinterpret_cast<const float*>(b.data), b.stride, beta, reinterpret_cast<float*>(c), stride);
  } else {
    cblas_dgemm(CblasRowMajor, ta, tb, m, n, k, alpha, reinterpret_cast<const double*>(a.data), a.stride,
                reinterpret_cast<const double*>(b.data), b.stride, beta, reinterpret_cast<double*>(c), stride);
  }
}

// y[rows, out] = x[rows, in] w^T + keep y
void linear_forward(int64_t rows, int in, int out, const Real* x, const Real* w, Real keep, Real* y) {
  product(int(rows), out, in, 1, {x, in}, {w, in, true}, keep, y, out);
}

// dw[out, in] = dy^T x;  dx[rows, in] = dy w
void linear_backward(int64_t rows, int in, int out, const Real* x, const Real* w, const Real* dy, Real* dx, Real* dw) {
  product(out, in, int(rows), 1, {dy, out, true}, {x, in}, 0, dw, in);
  product(int(rows), in, out, 1, {dy, out}, {w, in}, 0, dx, in);
}

// y = gain x / sqrt(mean(x^2) + epsilon); scale[row] keeps the 1 / sqrt(...)
void rmsnorm_forward(int64_t rows, int dim, const Real* x, const Real* gain, Real* y, Real* scale) {
  for (int64_t r = 0; r < rows; ++r, x += dim, y += dim) {
    Real squares = 0;
    for (int i = 0; i < dim; ++i) squares += x[i] * x[i];
    scale[r] = 1 / std::sqrt(squares / Real(dim) + kNormEpsilon);
    for (int i = 0; i < dim; ++i) y[i] = x[i] * scale[r] * gain[i];
  }
}

// dx += the norm's gradient (the caller has put the residual path's there); dgain is written.
void rmsnorm_backward(int64_t rows, int dim, const Real* x, const Real* gain, const Real* scale, const Real* dy,
                      Real* dx, Real* dgain) {
  std::fill(dgain, dgain + dim, Real(0));
  for (int64_t r = 0; r < rows; ++r, x += dim, dy += dim, dx += dim) {
    const Real s = scale[r];
    Real dot = 0;
    for (int i = 0; i < dim; ++i) dot += dy[i] * gain[i] * x[i];
    const Real along_x = dot * s * s * s / Real(dim);
    for (int i = 0; i < dim; ++i) {
      dx[i] += dy[i] * gain[i] * s - x[i] * along_x;
      dgain[i] += dy[i] * x[i] * s;
    }
  }
}

// GELU in its tanh form, written with one exponential: 0.5 (1 + tanh(u / 2)) is the sigmoid of u.
constexpr Real kGeluOuter = Real(1.5957691216057308);  // 2 sqrt(2 / pi)
constexpr Real kGeluCubic = Real(0.044715);

Real gelu_gate(Real x) { return 1 / (1 + std::exp(-kGeluOuter * (x + kGeluCubic * x * x * x))); }

void gelu_forward(int64_t count, const Real* x, Real* y) {
  for (int64_t i = 0; i < count; ++i) y[i] = x[i] * gelu_gate(x[i]);
}

void gelu_backward(int64_t count, const Real* x, Real* dy) {
  for (int64_t i = 0; i < count; ++i) {
    const Real gate = gelu_gate(x[i]);
    const Real slope = kGeluOuter * (1 + 3 * kGeluCubic * x[i] * x[i]);
    dy[i] *= gate + x[i] * gate * (1 - gate) * slope;
  }
}

// Softmax of the first `count` of `size` numbers; the rest become 0.
void softmax(int count, int size, Real* row) {
  const Real top = *std::max_element(row, row + count);
  Real sum = 0;
  for (int i = 0; i < count; ++i) sum += row[i] = std::exp(row[i] - top);
  for (int i = 0; i < count; ++i) row[i] /= sum;
  std::fill(row + count, row + size, Real(0));
}

// Each head of each sequence: out = softmax(q k^T / sqrt(head dim), causal) v. A row of qkv is q, k, v side by side.
void attention_forward(const Config& c, int batch, const Real* qkv, Real* attention, Real* out) {
  const int t = c.context, wide = 3 * c.dim;
  const Real scale = 1 / std::sqrt(Real(kHeadDim));
  for (int b = 0; b < batch; ++b) {
    for (int h = 0; h < c.heads(); ++h) {
      const Real* q = qkv + int64_t(b) * t * wide + h * kHeadDim;
      const Real *k = q + c.dim, *v = k + c.dim;
      Real* p = attention + (int64_t(b) * c.heads() + h) * t * t;
      product(t, t, kHeadDim, scale, {q, wide}, {k, wide, true}, 0, p, t);
      for (int row = 0; row < t; ++row) softmax(row + 1, t, p + int64_t(row) * t);
      product(t, kHeadDim, t, 1, {p, t}, {v, wide}, 0, out + int64_t(b) * t * c.dim + h * kHeadDim, c.dim);
    }
  }
}

// `dp` is room for one head's [context, context].
void attention_backward(const Config& c, int batch, const Real* qkv, const Real* attention, const Real* dout,
                        Real* dqkv, Real* dp) {
  const int t = c.context, wide = 3 * c.dim;
  const Real scale = 1 / std::sqrt(Real(kHeadDim));
  for (int b = 0; b < batch; ++b) {
    for (int h = 0; h < c.heads(); ++h) {
      const int64_t at = int64_t(b) * t * wide + h * kHeadDim;
      const Real *q = qkv + at, *k = q + c.dim, *v = k + c.dim;
      Real *dq = dqkv + at, *dk = dq + c.dim, *dv = dk + c.dim;
      const Real* p = attention + (int64_t(b) * c.heads() + h) * t * t;
      const Real* dy = dout + int64_t(b) * t * c.dim + h * kHeadDim;
      product(t, kHeadDim, t, 1, {p, t, true}, {dy, c.dim}, 0, dv, wide);
      product(t, t, kHeadDim, 1, {dy, c.dim}, {v, wide, true}, 0, dp, t);
      for (int row = 0; row < t; ++row) {  // through the softmax: ds = p (dp - sum(p dp)); p is 0 above the diagonal
        const Real* pr = p + int64_t(row) * t;
        Real* dr = dp + int64_t(row) * t;
        Real dot = 0;
        for (int i = 0; i <= row; ++i) dot += pr[i] * dr[i];
        for (int i = 0; i < t; ++i) dr[i] = pr[i] * (dr[i] - dot);
      }
      product(t, kHeadDim, t, scale, {dp, t}, {k, wide}, 0, dq, wide);
      product(t, kHeadDim, t, scale, {dp, t, true}, {q, wide}, 0, dk, wide);
    }
  }
}

}  // namespace

// ---- the params, as a list -----------------------------------------------------------------------------------------

Config config_by_name(const std::string& name) {
  if (name == "base") return {.layers = 6, .dim = 384, .context = 128};
  if (name == "tiny") return {.layers = 2, .dim = 128, .context = 64};
  throw std::invalid_argument("no model size \"" + name + "\": use base or tiny");
}

int64_t ParamSpec::elements() const {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

int64_t UnitSpec::elements() const {
  int64_t n = 0;
  for (const ParamSpec& p : params) n += p.elements();
  return n;
}

std::vector<UnitSpec> model_units(const Config& c) {
  const double std = 0.02;                                 // as GPT-2
  const double out_std = std / std::sqrt(2.0 * c.layers);  // what adds to the residual stream starts smaller
  std::vector<UnitSpec> units;
  units.push_back({"embed",
                   {{"embed.token", {kVocabulary, c.dim}, std, ""},  //
                    {"embed.position", {c.context, c.dim}, std, ""}}});
  for (int i = 0; i < c.layers; ++i) {
    const std::string name = "block" + std::to_string(i);
    units.push_back({name,
                     {{name + ".norm1", {c.dim}, 0, ""},
                      {name + ".qkv", {3 * c.dim, c.dim}, std, ""},
                      {name + ".proj", {c.dim, c.dim}, out_std, ""},
                      {name + ".norm2", {c.dim}, 0, ""},
                      {name + ".up", {c.hidden(), c.dim}, std, ""},
                      {name + ".down", {c.dim, c.hidden()}, out_std, ""}}});
  }
  units.push_back({"head",
                   {{"head.norm", {c.dim}, 0, ""},  //
                    {"head.token", {kVocabulary, c.dim}, std, "embed.token"}}});
  return units;
}

// ---- the layers ----------------------------------------------------------------------------------------------------

Scratch::Scratch(const Config& c, int batch) {
  const size_t rows = size_t(batch) * size_t(c.context), dim = size_t(c.dim), square = size_t(c.context) * c.context;
  for (auto* v : {&norm1, &mixed, &middle, &norm2, &d_middle, &d_norm, &norm}) v->resize(rows * dim);
  for (auto* v : {&scale1, &scale2, &scale}) v->resize(rows);
  for (auto* v : {&up, &act, &d_wide}) v->resize(rows * size_t(c.hidden()));
  qkv.resize(rows * 3 * dim);
  attention.resize(size_t(batch) * size_t(c.heads()) * square);
  d_attention.resize(square);
  probability.resize(rows * kVocabulary);
}

void embed_forward(const Config& c, int batch, const uint8_t* bytes, const Embed<const Real>& w, Real* x) {
  for (int64_t r = 0; r < int64_t(batch) * c.context; ++r, x += c.dim) {
    const Real* token = w.token + int64_t(bytes[r]) * c.dim;
    const Real* position = w.position + (r % c.context) * c.dim;
    for (int i = 0; i < c.dim; ++i) x[i] = token[i] + position[i];
  }
}

void embed_backward(const Config& c, int batch, const uint8_t* bytes, const Real* dx, const Embed<Real>& g) {
  std::fill(g.token, g.token + int64_t(kVocabulary) * c.dim, Real(0));
  std::fill(g.position, g.position + int64_t(c.context) * c.dim, Real(0));
  for (int64_t r = 0; r < int64_t(batch) * c.context; ++r, dx += c.dim) {
    Real* token = g.token + int64_t(bytes[r]) * c.dim;
    Real* position = g.position + (r % c.context) * c.dim;
    for (int i = 0; i < c.dim; ++i) token[i] += dx[i], position[i] += dx[i];
  }
}

void block_forward(const Config& c, int batch, const Block<const Real>& w, const Real* x, Real* y, Scratch* s) {
  const int64_t rows = int64_t(batch) * c.context;
  rmsnorm_forward(rows, c.dim, x, w.norm1, s->norm1.data(), s->scale1.data());
  linear_forward(rows, c.dim, 3 * c.dim, s->norm1.data(), w.qkv, 0, s->qkv.data());
  attention_forward(c, batch, s->qkv.data(), s->attention.data(), s->mixed.data());
  std::copy(x, x + rows * c.dim, s->middle.data());
  linear_forward(rows, c.dim, c.dim, s->mixed.data(), w.proj, 1, s->middle.data());

  rmsnorm_forward(rows, c.dim, s->middle.data(), w.norm2, s->norm2.data(), s->scale2.data());
  linear_forward(rows, c.dim, c.hidden(), s->norm2.data(), w.up, 0, s->up.data());
  gelu_forward(rows * c.hidden(), s->up.data(), s->act.data());
  std::copy(s->middle.data(), s->middle.data() + rows * c.dim, y);
  linear_forward(rows, c.hidden(), c.dim, s->act.data(), w.down, 1, y);
}

void block_backward(const Config& c, int batch, const Block<const Real>& w, const Real* x, const Real* dy, Real* dx,
                    const Block<Real>& g, Scratch* s) {
  const int64_t rows = int64_t(batch) * c.context;
  Real *wide = s->d_wide.data(), *middle = s->d_middle.data(), *norm = s->d_norm.data();
  std::copy(dy, dy + rows * c.dim, middle);
  linear_backward(rows, c.hidden(), c.dim, s->act.data(), w.down, dy, wide, g.down);
  gelu_backward(rows * c.hidden(), s->up.data(), wide);
  linear_backward(rows, c.dim, c.hidden(), s->norm2.data(), w.up, wide, norm, g.up);
  rmsnorm_backward(rows, c.dim, s->middle.data(), w.norm2, s->scale2.data(), norm, middle, g.norm2);

  std::copy(middle, middle + rows * c.dim, dx);
  linear_backward(rows, c.dim, c.dim, s->mixed.data(), w.proj, middle, norm, g.proj);
  attention_backward(c, batch, s->qkv.data(), s->attention.data(), norm, wide, s->d_attention.data());
  linear_backward(rows, c.dim, 3 * c.dim, s->norm1.data(), w.qkv, wide, norm, g.qkv);
  rmsnorm_backward(rows, c.dim, x, w.norm1, s->scale1.data(), norm, dx, g.norm1);
}

void head_forward(const Config& c, int64_t rows, const Head<const Real>& w, const Real* x, Scratch* s) {
  rmsnorm_forward(rows, c.dim, x, w.norm, s->norm.data(), s->scale.data());
  linear_forward(rows, c.dim, kVocabulary, s->norm.data(), w.token, 0, s->probability.data());
  for (int64_t r = 0; r < rows; ++r) softmax(kVocabulary, kVocabulary, s->probability.data() + r * kVocabulary);
}

double head_loss(int64_t rows, const uint8_t* targets, const Scratch& s) {
  double sum = 0;
  for (int64_t r = 0; r < rows; ++r) sum -= std::log(double(s.probability[size_t(r * kVocabulary + targets[r])]));
  return sum / double(rows);
}

void head_backward(const Config& c, int64_t rows, const Head<const Real>& w, const Real* x, const uint8_t* targets,
                   Real* dx, const Head<Real>& g, Scratch* s) {
  Real* d = s->probability.data();  // becomes the gradient at the logits: (probability - 1 at the target) / rows
  for (int64_t r = 0; r < rows; ++r) d[r * kVocabulary + targets[r]] -= 1;
  for (int64_t i = 0; i < rows * kVocabulary; ++i) d[i] /= Real(rows);
  linear_backward(rows, c.dim, kVocabulary, s->norm.data(), w.token, d, s->d_norm.data(), g.token);
  std::fill(dx, dx + rows * c.dim, Real(0));
  rmsnorm_backward(rows, c.dim, x, w.norm, s->scale.data(), s->d_norm.data(), dx, g.norm);
}

void set_threads(int threads) { openblas_set_num_threads(threads); }

}  // namespace gpt
