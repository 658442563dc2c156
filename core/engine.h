// engine.h - one rank: opens the plugins, plans and allocates, and runs the step. Read engine.cc top to bottom.
//
// Who does what: the host thread makes every decision; the collective thread (comm_queue.h) launches collectives in the
// order they were submitted; the update thread (update/updater.h) runs the optimizer. The engine's own state is touched
// by the host thread only, under the lock the C API takes; `failure_` is the exception.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/agreement.h"
#include "core/consensus.h"
#include "core/manifest/settings.h"
#include "core/plan.h"
#include "core/plugins/cores.h"
#include "core/plugins/plugins.h"
#include "core/progress.h"
#include "core/snapshot.h"
#include "core/update/updater.h"

namespace strata {

class Engine {
 public:
  static Status open(const strata_engine_args& args, std::unique_ptr<Engine>* out);
  ~Engine();

  Status add_group(const strata_group_args& args, uint32_t* out);
  Status add_unit(const char* name, uint32_t* out);
  Status add_param(uint32_t unit, const strata_param_args& args, uint32_t* out);
  Status commit();

  Status write_param(uint32_t param, const strata_tensor* value, int32_t root);
  Status read_param(uint32_t param, const char* array, const strata_tensor& out);

  Status fetch(uint32_t unit, const strata_stream* stream);
  Status release(uint32_t unit, const strata_stream* stream);
  Status view(uint32_t param, strata_tensor* out);
  // The params of a registered unit.
  Status params_of(uint32_t unit, const std::vector<uint32_t>** out) const;
  Status grads(const uint32_t* params, const std::vector<strata_tensor>& grads, const strata_stream* stream);
  Status grads_done(uint32_t unit);
  Status end_backward();
  Status drop_gradients();
  Status check_group_count(uint64_t count) const;
  Status step(const strata_step_args* args);
  Status wait();
  Status fail(const Status& status);
  Status step_info(strata_step_info* out);

  Status counters(strata_counter_span span, strata_counters* out);
  Status plan(strata_plan_item* items, uint64_t capacity, uint64_t* count);
  Status device_info(strata_device_info* out);
  Status setting(const char* key, const char** value);
  Status plugin_interface(const std::string& role, const char* id, const void** table);

  Status save(const char* root, const char* tag);
  Status load(const char* root, const char* tag);
  Status export_weights(const char* path);
  Status set_meta(const char* key, const char* value);
  Status get_meta(const char* key, const char** value);

  const Places& places() const { return places_; }
  std::mutex& mutex() { return mutex_; }
  bool is_forked_child() const;

 private:
  Engine() = default;
  Status read_settings(const strata_engine_args& args);
  Status open_among_ranks(const strata_engine_args& args);
  Status meet(const strata_engine_args& args, strata_collective_caps* ranks);
  Status open_plugins(const strata_engine_args& args, const strata_collective_caps& ranks);
  template <class Opened, class Api>
  Status open_plugin(const std::string& role, const std::string& name, const char* id, Opened* instance,
                     const Api** table);
  void log_plugins();
  struct Greeting;
  Status greet(std::vector<Greeting>* all);
  Status find_place(const strata_collective_caps& ranks);
  Status exchange(Among among, const std::string& what, const void* mine, void* all, uint64_t bytes);
  Status or_abort(const Status& status) const;
  Collective& group() { return places_.parts() == 1 ? collective_ : split_; }
  void choose_cores(const std::vector<Greeting>& all);
  Status take_lender(const strata_lender* lender, const strata_collective_caps& ranks);
  Status check_device(const strata_collective_caps& ranks) const;
  Status open_tier(OffloadDevice where, std::unique_ptr<Tier>* out);
  Status open_host_device();
  Status agree_on_model();
  std::vector<Consensus::Value> common_values() const;
  void build_parts();
  Status place_states();
  Status make_plan();
  void count_sums();
  std::string kept_state(TierKind tier) const;
  std::string why_no_state() const;
  void warn_of_no_split() const;
  Status check_device_memory(uint64_t lent);
  std::string device_need() const;
  Status allocate();
  Status allocate_parts();
  void take_down();
  Status recover();
  void say_loaded(const Loaded& found) const;

  void note_failure(const Status& status);
  Status usable(bool committed = true);
  Status undo_write(uint32_t unit, const strata_stream* stream);
  Status known_unit(uint32_t unit) const;
  Status known_param(uint32_t param) const;
  Status check_stream(const strata_stream** stream) const;
  Status between_steps(const std::string& what);
  Status open_checkpoint();
  Status settle();
  Status try_step(const strata_step_args* args);
  void log_breakdown();
  void start_progress();
  std::unique_ptr<Trace> make_trace();
  void warn_of_idle_tiers() const;
  const Tier* kept_tier(const Tier& tier) const;
  std::vector<strata_optim_group> step_groups(const strata_step_args* args) const;
  Status step_max_norm(const strata_step_args* args, double* out) const;
  void log(strata_log_level level, const std::string& text) const;

  // In the order they are built; destroyed in reverse, threads first.
  std::mutex mutex_;
  int pid_ = 0;
  Settings settings_;
  LogSink sink_;
  // In log lines on stderr; -1 until the collective knows it, and at world 1.
  std::shared_ptr<std::atomic<int>> log_rank_ = std::make_shared<std::atomic<int>>(-1);
  std::unique_ptr<PluginSet> plugins_;
  std::unique_ptr<Host> host_;
  strata_open_args open_args_{};
  strata_lender lender_{};  // of gradient memory; no functions: nothing is lent
  std::string job_;
  Places places_;
  const Consensus consensus_{places_, [this](Among among, const std::string& what, const void* mine, void* all,
                                             uint64_t bytes) { return exchange(among, what, mine, all, bytes); }};
  int local_world_ = 1;
  CoreShare cores_;
  std::vector<int> bound_to_;  // the CPUs of our threads; none: wherever the host program's may run
  std::chrono::nanoseconds deadline_{0};
  Counters counters_;
  Device device_;
  Device host_device_;     // of host memory; open where gradients are added up there, beside device_
  Collective collective_;  // of the whole world
  Collective split_;       // of this data-parallel group, where that is only a part of it
  Offload offload_cpu_, offload_nvme_;
  Optimizer optimizer_, device_optimizer_;
  Checkpoint checkpoint_;
  std::unique_ptr<Tier> device_tier_, state_tier_, weight_tier_;
  std::unique_ptr<Tier> kept_tier_;  // host memory for what is kept out of one that is none; may be NULL
  std::unique_ptr<Registry> registry_;

  bool committed_ = false;
  Layout layout_;
  Plan plan_;
  std::unique_ptr<Trace> trace_;
  int traces_ = 0;  // made: an engine that is committed again begins another
  std::unique_ptr<CommQueue> queue_;
  std::unique_ptr<Weights> weights_;
  std::unique_ptr<StatePlaces> state_places_;
  std::unique_ptr<Gradients> gradients_;
  std::unique_ptr<Agreement> agreement_;
  std::unique_ptr<States> states_;
  std::unique_ptr<Tensors> tensors_;
  std::unique_ptr<Snapshot> snapshot_;
  std::unique_ptr<Progress> progress_;
  std::unique_ptr<Updater> updater_;

  RunState run_;
  std::shared_ptr<StepOutcome> outcome_;  // of the last step
  bool settled_ = true;                   // its result is in run_ and its order with the gradients
  strata_counters at_last_step_{}, before_last_step_{};
  std::map<std::string, std::string> setting_texts_;  // handed out by setting()

  mutable std::mutex failure_mutex_;
  Status failure_;
};

}  // namespace strata
