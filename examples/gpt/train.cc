// train.cc - the training loop. Read train_step() and micro_batch() first: this is what every host of Strata does.
#include "train.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numbers>
#include <thread>

namespace gpt {

// ---- one training step ---------------------------------------------------------------------------------------------

double Trainer::train_step(uint64_t step) {
  double loss = 0;
  for (int micro = 0; micro < accumulation_; ++micro) {
    load_batch(step, micro);
    loss += micro_batch() / accumulation_;
  }

  // ======== step: returns while the update still runs; the next fetch of a unit waits for that unit alone ========
  strata_step_args args;
  STRATA_INIT(&args);
  args.lr = learning_rate(step);
  args.loss = loss;  // with the tokens it is for the line that the engine logs every steps_per_print steps
  args.tokens = uint64_t(accumulation_) * uint64_t(batch_) * uint64_t(config_.context);
  check(strata_step(engine_.get(), &args), "updating the weights");
  return loss;
}

// One micro-batch; returns its mean loss. Averaging gradients over micro-batches and ranks is Strata's part.
double Trainer::micro_batch() {
  const int head = config_.layers + 1;
  const int64_t rows = int64_t(batch_) * config_.context;

  // ======== forward ========
  forward_blocks(batch_);

  // ======== loss: the head's forward and backward in one visit ========
  const Head<const Real> weights(model_.fetch(head));
  head_forward(config_, rows, weights, x_.back().data(), &scratch_);
  const double loss = head_loss(rows, target_.data(), scratch_);
  const Head<Real> gradients(model_.gradients(head));
  head_backward(config_, rows, weights, x_.back().data(), target_.data(), dx_.data(), gradients, &scratch_);
  model_.release(head);
  model_.hand_over(head);

  // ======== backward: each block forward again, for what its backward needs, then backward ========
  for (int unit = config_.layers; unit >= 1; --unit) {
    const Real* x = x_[size_t(unit) - 1].data();
    const Block<const Real> w(model_.fetch(unit));
    const Block<Real> g(model_.gradients(unit));
    block_forward(config_, batch_, w, x, x_[size_t(unit)].data(), &scratch_);
    block_backward(config_, batch_, w, x, dx_.data(), dx_.data(), g, &scratch_);
    model_.release(unit);
    model_.hand_over(unit);
  }
  embed_backward(config_, batch_, input_.data(), dx_.data(), Embed<Real>(model_.gradients(0)));
  model_.hand_over(0);
  check(strata_end_backward(engine_.get()), "ending the backward pass");
  return loss;
}

// Embedding and blocks of the first `batch` loaded samples; every block's input stays in x_.
void Trainer::forward_blocks(int batch) {
  embed_forward(config_, batch, input_.data(), Embed<const Real>(model_.fetch(0)), x_[0].data());
  model_.release(0);
  for (int unit = 1; unit <= config_.layers; ++unit) {
    const Block<const Real> w(model_.fetch(unit));
    block_forward(config_, batch, w, x_[size_t(unit) - 1].data(), x_[size_t(unit)].data(), &scratch_);
    model_.release(unit);
  }
}

// This rank's samples of the step's global batch.
void Trainer::load_batch(uint64_t step, int micro) {
  input_.clear();
  target_.clear();
  for (int i = 0; i < batch_; ++i) {
    const uint64_t sample = uint64_t((micro * world_ + rank_) * batch_ + i);
    text_.train_sample(options_.seed, step, sample, &input_, &target_);
  }
}

// Linear warm-up, then a cosine down to a tenth.
double Trainer::learning_rate(uint64_t step) const {
  if (step < options_.warmup) return options_.lr * double(step + 1) / double(options_.warmup);
  const uint64_t falling = std::max(options_.steps, options_.warmup + 1) - options_.warmup;
  const double done = std::min(1.0, double(step - options_.warmup) / double(falling));
  return options_.lr * (0.55 + 0.45 * std::cos(std::numbers::pi * done));
}

// Mean loss over evenly spaced held-out samples. Fetching is collective, so every rank evaluates the same ones.
double Trainer::evaluate() {
  const int head = config_.layers + 1;
  double sum = 0;
  for (uint64_t first = 0; first < options_.eval_samples; first += uint64_t(batch_)) {
    const int batch = int(std::min(uint64_t(batch_), options_.eval_samples - first));
    const int64_t rows = int64_t(batch) * config_.context;
    input_.clear();
    target_.clear();
    for (int i = 0; i < batch; ++i) {
      text_.held_out_sample(first + uint64_t(i), options_.eval_samples, &input_, &target_);
    }
    forward_blocks(batch);
    head_forward(config_, rows, Head<const Real>(model_.fetch(head)), x_.back().data(), &scratch_);
    model_.release(head);
    sum += batch * head_loss(rows, target_.data(), scratch_);
  }
  return sum / double(options_.eval_samples);
}

// ---- the run -------------------------------------------------------------------------------------------------------

Trainer::Trainer(const Options& options)
    : options_(options),
      config_(config_by_name(options.size)),
      engine_(open_engine(options.manifest, options.settings)),
      model_(engine_.get(), config_, choose_dtype(engine_.get(), options.dtype)),
      text_(options.text, config_.context),
      rank_(strata_rank(engine_.get())),
      world_(strata_world(engine_.get())),
      batch_(int(int_setting(engine_.get(), "train_micro_batch_size_per_gpu"))),
      accumulation_(int(int_setting(engine_.get(), "gradient_accumulation_steps"))),
      report_(engine_.get(), model_, options.steps, options.report_gather),
      scratch_(config_, batch_) {
  const size_t count = size_t(batch_) * size_t(config_.context) * size_t(config_.dim);
  x_.assign(size_t(config_.layers) + 1, std::vector<Real>(count));
  dx_.resize(count);
  if (std::isnan(options_.lr)) options_.lr = float_setting(engine_.get(), "optimizer.params.lr");
  const int cores = int(std::thread::hardware_concurrency());
  set_threads(options_.threads > 0 ? options_.threads : std::max(1, cores / world_));
}

void Trainer::run() {
  if (options_.resume.empty()) {
    model_.initialize(options_.seed);
  } else {
    resume();
  }
  const uint64_t end = options_.eval_only ? first_step_ : std::max(first_step_, options_.steps);
  report_.restart_count();
  for (uint64_t step = first_step_; step < end; ++step) {
    const double loss = train_step(step);
    const uint64_t done = step + 1;
    report_.step(done, loss);
    if (options_.eval_every && done % options_.eval_every == 0 && done < end) {
      report_.held_out(done, evaluate(), options_.eval_samples);
      report_.restart_count();
    }
    if (!options_.save.empty() && (done == end || (options_.save_every && done % options_.save_every == 0))) {
      save(done);
      report_.restart_count();
    }
  }
  report_.held_out(end, evaluate(), options_.eval_samples);
  if (!options_.export_path.empty()) {
    check(strata_export_weights(engine_.get(), options_.export_path.c_str()), "writing the weight file");
    report_.say("wrote %s", options_.export_path.c_str());
  }
}

// The place in the data and in the learning-rate schedule follows from the step, so the step is all a resume needs.
void Trainer::save(uint64_t step) {
  const uint64_t tokens = step * uint64_t(world_ * accumulation_ * batch_ * config_.context);
  check(strata_set_meta(engine_.get(), "gpt.step", std::to_string(step).c_str()), "noting the step");
  check(strata_set_meta(engine_.get(), "gpt.tokens", std::to_string(tokens).c_str()), "noting the tokens");
  char tag[32];
  std::snprintf(tag, sizeof tag, "step%06llu", (unsigned long long)step);
  check(strata_save(engine_.get(), options_.save.c_str(), tag), "saving a checkpoint");
  report_.say("saved %s/%s", options_.save.c_str(), tag);
}

void Trainer::resume() {
  const char* tag = options_.tag.empty() ? nullptr : options_.tag.c_str();
  check(strata_load(engine_.get(), options_.resume.c_str(), tag), "loading a checkpoint");
  const char* step = nullptr;
  check(strata_get_meta(engine_.get(), "gpt.step", &step), "reading the checkpoint's step");
  first_step_ = std::stoull(step);
  report_.say("resumed %s at step %s", options_.resume.c_str(), step);
}

}  // namespace gpt
