// sharded.h - the model's params in a Strata engine: registered once, then fetched unit by unit as fp32 pointers.
//
// This is all the glue a host needs: names and shapes go in, weights come out while a unit is fetched, gradients go
// back. One unit is in use at a time. Unit u here is strata_unit u: they are added in the order of model_units().
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "model.h"
#include "strata/strata.h"

namespace gpt {

// Throws what strata_last_error() says when a call failed.
void check(strata_status status, const char* what);

// Stdout and stderr are a terminal that can show a progress bar. mpirun lends its ranks one for stdout, wherever its
// own output goes, and a pipe for stderr: stdout alone does not say where the bar would end.
bool shows_bar();

struct CloseEngine {
  void operator()(strata_engine* engine) const { strata_close(engine); }
};
using Engine = std::unique_ptr<strata_engine, CloseEngine>;

// `settings` override the manifest: "zero_optimization.stage=2". [collective]
Engine open_engine(const std::string& manifest, const std::vector<std::string>& settings);

// A manifest setting by its key, derived values included.
std::string setting(strata_engine* engine, const char* key);
int64_t int_setting(strata_engine* engine, const char* key);
double float_setting(strata_engine* engine, const char* key);

// The dtype asked for ("bf16", "fp32"), or "": bf16 when the manifest enables it, else fp32.
strata_dtype choose_dtype(strata_engine* engine, const std::string& dtype);

class ShardedModel {
 public:
  // Registers every param with `dtype` and commits. [collective]
  ShardedModel(strata_engine* engine, const Config& config, strata_dtype dtype);

  // Sets the initial weights, which depend on the seed and the param's name only. [collective]
  void initialize(uint64_t seed);

  // Fetches a unit and returns its weights in fp32, in the order of its UnitSpec. [collective at stage 3]
  const Real* const* fetch(int unit);
  void release(int unit);

  // Room for a unit's gradients, in the same order; hand_over gives them to the engine and says that is all. The engine
  // has copied them when hand_over returns; without contiguous_gradients they stay untouched until the backward ends.
  Real* const* gradients(int unit);
  void hand_over(int unit);

  // All weights in fp32, by name, as generate() wants them. [collective]
  std::map<std::string, std::vector<float>> read_all();

  int unit_count() const { return int(units_.size()); }
  // The ZeRO-3 formula for what a rank gets from others: passes x weight bytes x (world - 1) / world. Params of at most
  // `threshold` elements stay whole, while `room` for them lasts, and are gathered once.
  double gather_bytes(int64_t passes, int64_t threshold, int64_t room) const;

 private:
  strata_tensor tensor(const ParamSpec& spec, void* data, strata_dtype dtype) const;

  strata_engine* engine_;
  strata_dtype dtype_;
  std::vector<UnitSpec> units_;
  std::vector<std::vector<strata_param>> ids_;  // [unit][param]
  bool contiguous_gradients_;
  std::vector<Real> wide_;                   // as large as the largest unit
  std::vector<std::vector<Real>> gradient_;  // one such; one per unit without contiguous_gradients
  std::vector<const Real*> weight_pointers_;
  std::vector<Real*> gradient_pointers_;
};

}  // namespace gpt
