// model.h - the arithmetic of a small GPT: forward and backward of each layer, on plain pointers.
//
// Bytes are the tokens. A token becomes a row of `dim` numbers (its embedding plus its position's); each block adds to
// the row what attention and the MLP make of it; the head compares the row with every byte's embedding (tied weights).
//
//     block:  x += attention(rmsnorm(x));  x += down(gelu(up(rmsnorm(x))))
//
// Nothing here knows about Strata: weights come in as pointers, gradients go out through pointers, and the caller owns
// every buffer. A matrix is row-major and a weight is [out, in], as in PyTorch: y = x W^T. `rows` is batch x context.
// Gradients are written, not added. Functions keep no state, so one thread may run one model.
//
// Real is float. The finite-difference test compiles the same code with double, where differences are exact enough
// to check every digit that matters.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#ifndef GPT_REAL
#define GPT_REAL float
#endif

namespace gpt {

using Real = GPT_REAL;

constexpr int kVocabulary = 256;
constexpr int kHeadDim = 64;  // fixed, so that a weight file's shapes tell the whole model

struct Config {
  int layers, dim, context;
  int heads() const { return dim / kHeadDim; }
  int hidden() const { return 4 * dim; }
};

// "base": 10.8 M params. "tiny": 0.4 M, for tests.
Config config_by_name(const std::string& name);

// ---- the params, as a list -----------------------------------------------------------------------------------------
// One unit is fetched, used and released at a time: "embed", then "block0", "block1", ..., then "head".

struct ParamSpec {
  std::string name;
  std::vector<int64_t> shape;
  double init_std;      // 0: starts as ones (a norm's gain), and has no weight decay
  std::string tied_to;  // name of the param whose storage this is, or ""
  int64_t elements() const;
};

struct UnitSpec {
  std::string name;
  std::vector<ParamSpec> params;
  int64_t elements() const;
};

std::vector<UnitSpec> model_units(const Config& config);

// A unit's weights (const Real) or gradients (Real), in the order of its UnitSpec.
template <class T>
struct Embed {
  T *token, *position;  // [256, dim] [context, dim]
  explicit Embed(T* const* p) : token(p[0]), position(p[1]) {}
};
template <class T>
struct Block {
  T *norm1, *qkv, *proj, *norm2, *up, *down;  // [dim] [3 dim, dim] [dim, dim] [dim] [hidden, dim] [dim, hidden]
  explicit Block(T* const* p) : norm1(p[0]), qkv(p[1]), proj(p[2]), norm2(p[3]), up(p[4]), down(p[5]) {}
};
template <class T>
struct Head {
  T *norm, *token;  // [dim] [256, dim]
  explicit Head(T* const* p) : norm(p[0]), token(p[1]) {}
};

// ---- the layers ----------------------------------------------------------------------------------------------------

// What a layer's forward leaves for its backward, for up to `batch` sequences. One is enough for the whole model:
// blocks are computed again in the backward pass, so only each block's input is kept.
struct Scratch {
  Scratch(const Config& config, int batch);
  std::vector<Real> norm1, scale1, qkv, attention, mixed, middle, norm2, scale2, up, act;  // block
  std::vector<Real> d_wide, d_middle, d_norm, d_attention;                                 // its backward
  std::vector<Real> norm, scale, probability;                                              // head
};

// x[rows, dim] = token[byte] + position
void embed_forward(const Config& c, int batch, const uint8_t* bytes, const Embed<const Real>& w, Real* x);
void embed_backward(const Config& c, int batch, const uint8_t* bytes, const Real* dx, const Embed<Real>& g);

// y[rows, dim] = block(x); y may be x. Backward needs x, and the scratch as forward left it; dx may be dy.
void block_forward(const Config& c, int batch, const Block<const Real>& w, const Real* x, Real* y, Scratch* s);
void block_backward(const Config& c, int batch, const Block<const Real>& w, const Real* x, const Real* dy, Real* dx,
                    const Block<Real>& g, Scratch* s);

// Probabilities of the next byte for every row, left in scratch.probability[rows, 256].
void head_forward(const Config& c, int64_t rows, const Head<const Real>& w, const Real* x, Scratch* s);
// Mean over rows of -log probability[target], in nats per byte, after head_forward.
double head_loss(int64_t rows, const uint8_t* targets, const Scratch& s);
// The gradient of that mean, after head_forward; overwrites scratch.probability.
void head_backward(const Config& c, int64_t rows, const Head<const Real>& w, const Real* x, const uint8_t* targets,
                   Real* dx, const Head<Real>& g, Scratch* s);

// Number of threads the matrix products use.
void set_threads(int threads);

}  // namespace gpt
