// whole_model.h - the sample's model without an engine: all weights in one vector, one loss, all gradients.
//
// The order is that of gpt::model_units(), params after one another. A tied name has its own place in both vectors:
// weights are copied there from the owner by tie(), and its gradient is reported apart from the owner's.
#pragma once

#include <algorithm>
#include <vector>

#include "model.h"

namespace gpt::test {

struct Sample {
  int batch;
  std::vector<uint8_t> input, target;  // [batch, context]
};

class WholeModel {
 public:
  WholeModel(const Config& config, int batch) : config_(config), units_(model_units(config)), scratch_(config, batch) {
    for (const UnitSpec& u : units_) size_ += size_t(u.elements());
    x_.assign(size_t(config.layers) + 1, std::vector<Real>(size_t(batch) * size_t(config.context * config.dim)));
    dx_.resize(x_[0].size());
  }

  size_t size() const { return size_; }
  const std::vector<UnitSpec>& units() const { return units_; }

  // Copies owners' values to the names tied to them.
  void tie(std::vector<Real>* weights) const {
    const Real* token = weights->data();
    Real* tied = weights->data() + size_ - size_t(kVocabulary * config_.dim);
    std::copy(token, token + kVocabulary * config_.dim, tied);
  }

  double loss(const std::vector<Real>& weights, const Sample& s) {
    forward(weights, s);
    return head_loss(rows(s), s.target.data(), scratch_);
  }

  // The mean over the first `count` positions of the first sequence.
  double prefix_loss(const std::vector<Real>& weights, const Sample& s, int64_t count) {
    forward(weights, s);
    return head_loss(count, s.target.data(), scratch_);
  }

  // As the training program does it: blocks are computed again in the backward pass.
  double loss_and_gradients(const std::vector<Real>& weights, const Sample& s, std::vector<Real>* gradients) {
    gradients->assign(size_, Real(-1e30));  // every place must be written
    forward(weights, s);
    const double value = head_loss(rows(s), s.target.data(), scratch_);
    const int head = config_.layers + 1;
    head_backward(config_, rows(s), Head<const Real>(at(weights, head)), x_.back().data(), s.target.data(), dx_.data(),
                  Head<Real>(at(*gradients, head)), &scratch_);
    for (int u = config_.layers; u >= 1; --u) {
      const Block<const Real> w(at(weights, u));
      const Real* x = x_[size_t(u) - 1].data();
      block_forward(config_, s.batch, w, x, x_[size_t(u)].data(), &scratch_);
      block_backward(config_, s.batch, w, x, dx_.data(), dx_.data(), Block<Real>(at(*gradients, u)), &scratch_);
    }
    embed_backward(config_, s.batch, s.input.data(), dx_.data(), Embed<Real>(at(*gradients, 0)));
    return value;
  }

 private:
  int64_t rows(const Sample& s) const { return int64_t(s.batch) * config_.context; }

  void forward(const std::vector<Real>& weights, const Sample& s) {
    embed_forward(config_, s.batch, s.input.data(), Embed<const Real>(at(weights, 0)), x_[0].data());
    for (int u = 1; u <= config_.layers; ++u) {
      block_forward(config_, s.batch, Block<const Real>(at(weights, u)), x_[size_t(u) - 1].data(), x_[size_t(u)].data(),
                    &scratch_);
    }
    head_forward(config_, rows(s), Head<const Real>(at(weights, config_.layers + 1)), x_.back().data(), &scratch_);
  }

  // Pointers to a unit's params. Valid until the next call with the same kind of vector.
  const Real* const* at(const std::vector<Real>& v, int unit) { return pointers(v.data(), unit, &reads_); }
  Real* const* at(std::vector<Real>& v, int unit) { return pointers(v.data(), unit, &writes_); }

  template <class T>
  T* const* pointers(T* p, int unit, std::vector<T*>* out) const {
    for (int u = 0; u < unit; ++u) p += units_[size_t(u)].elements();
    out->clear();
    for (const ParamSpec& spec : units_[size_t(unit)].params) {
      out->push_back(p);
      p += spec.elements();
    }
    return out->data();
  }

  Config config_;
  std::vector<UnitSpec> units_;
  Scratch scratch_;
  size_t size_ = 0;
  std::vector<std::vector<Real>> x_;
  std::vector<Real> dx_;
  std::vector<const Real*> reads_;
  std::vector<Real*> writes_;
};

}  // namespace gpt::test
