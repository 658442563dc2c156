// split_model.h - a model that tensor and pipeline parallelism split, for tests: what each rank registers of it, the
// gradients a host would compute there, and the same training of the whole model without Strata.
//
// Each pipeline stage has a unit of a matrix split by rows, one split by columns, a bias that is split and one that is
// not, and a norm that is not. The first stage has an embedding on top, split by rows; where there are several stages
// the last one has a copy of it, with the same gradients, as Megatron ties them. Gradients are smooth functions of the
// element's place in the whole, so that every rank can make its part of them.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/train/harness.h"

namespace strata::test {

struct Cut {
  int tensor = 1, pipeline = 1, data = 1;
  int world() const { return tensor * pipeline * data; }
};

struct WholeParam {
  std::string name;
  int64_t rows = 1, cols = 1;
  enum { kNone, kRows, kCols } split = kNone;
  int stage = 0;     // pipeline stage that counts it
  int copy_at = -1;  // pipeline stage that has a copy of it
  int64_t numel() const { return rows * cols; }
};
std::vector<WholeParam> whole_model(int stages);

// What one rank has of a param.
struct LocalParam {
  size_t whole = 0;     // index in whole_model
  bool shared = false;  // the copy
  std::vector<int64_t> shape;
  std::vector<uint64_t> places;  // of its elements in the whole param
};

// Where a rank is, as Strata says.
strata_ranks ranks_of(strata_engine* engine);
std::vector<LocalParam> local_params(const std::vector<WholeParam>& whole, const strata_ranks& ranks);

// A trial of this model; `body` is to be given. One batch per data-parallel rank.
Trial split_trial(const Cut& cut, int stage, int micro_batches);
// Each rank with a trial of its own; the body gets NULL where the engine did not open, and `error` says why.
void each_rank(int world, const std::function<Trial(int)>& trial_of,
               const std::function<void(int, strata_engine*, const std::string& error)>& body);
// Registers this rank's part and writes the initial values. Empty text when all went well.
std::string build_split_model(strata_engine* engine, const std::vector<WholeParam>& whole);
// All micro-batches of a step, without strata_step. `poison`: changes a gradient on its way.
using Poison = std::function<void(const LocalParam&, int micro, std::vector<float>* gradient)>;
std::string split_backward(strata_engine* engine, const std::vector<WholeParam>& whole, int step, int micro_batches,
                           const Poison& poison = {});
std::string split_step(strata_engine* engine, double lr);
// An array of all local params, put where they lie in the whole; elements of other ranks stay as they are.
std::string collect_split(strata_engine* engine, const std::vector<WholeParam>& whole, const char* array,
                          std::map<std::string, std::vector<float>>* out);

// Puts what one rank collected into what all have.
void merge(const std::map<std::string, std::vector<float>>& one, std::map<std::string, std::vector<float>>* all);

// The whole model, AdamW in fp64: the values after `steps` steps, and the norm of each. `skips`: steps to leave out.
struct WholeResult {
  std::map<std::string, std::vector<double>> weights;
  std::vector<double> norms, clips;
};
WholeResult train_whole(const std::vector<WholeParam>& whole, int data, int micro_batches, int steps, double max_norm,
                        const std::vector<int>& skips = {});

}  // namespace strata::test
