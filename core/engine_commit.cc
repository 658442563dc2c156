// engine_commit.cc - from registered params to an engine that can step: layout, parts, agreement, plan, memory.
#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "core/engine.h"
#include "core/hash.h"
#include "core/manifest/manifest_keys.h"

namespace strata {

Status Engine::add_group(const strata_group_args& args, uint32_t* out) {
  STRATA_RETURN_IF_ERROR(usable(false));
  STRATA_RETURN_IF_ERROR(registry_->add_group(args, out));
  float scalars[STRATA_OPTIM_SCALARS];
  const Status valid = optimizer_.scalars(registry_->groups.back(), 1, scalars);
  if (!valid.ok()) registry_->drop_group();
  return valid.during("group " + std::to_string(*out));
}

namespace {
Status check_name(const char* name, const char* what) {
  if (!name || is_utf8(name)) return Ok();
  return {STRATA_INVALID_ARGUMENT,
          std::string("the name of a ") + what + " is not UTF-8, as text in checkpoints must be"};
}
}  // namespace

Status Engine::add_unit(const char* name, uint32_t* out) {
  STRATA_RETURN_IF_ERROR(usable(false));
  STRATA_RETURN_IF_ERROR(check_name(name, "unit"));
  return registry_->add_unit(name ? name : "", out);
}

Status Engine::add_param(uint32_t unit, const strata_param_args& args, uint32_t* out) {
  STRATA_RETURN_IF_ERROR(usable(false));
  STRATA_RETURN_IF_ERROR(check_name(args.name, "param"));
  if ((args.flags & STRATA_PARAM_SHARED) != 0 && places_.parts() == 1) {
    return {STRATA_INVALID_ARGUMENT, "param \"" + std::string(args.name ? args.name : "") +
                                         "\": STRATA_PARAM_SHARED where tensor_model_parallel_size and "
                                         "pipeline_model_parallel_size are 1: no other rank counts it in the norm"};
  }
  return registry_->add_param(unit, args, out);
}

Status Engine::commit() {
  STRATA_RETURN_IF_ERROR(usable(false));
  take_down();  // what an earlier commit that was refused left
  const ZeroSettings& zero = settings_.zero_optimization;
  layout_ = make_layout(*registry_, zero, places_, weight_tier_->kind() != kDeviceTier);
  build_parts();
  const Status streams = queue_->create_streams();
  STRATA_RETURN_IF_ERROR(agree_on_model());
  STRATA_RETURN_IF_ERROR(consensus_.all_ok(Among::kEveryone, streams.ok() ? make_plan() : streams, "memory plan"));
  STRATA_RETURN_IF_ERROR(consensus_.all_ok(Among::kEveryone, allocate(), "allocation"));
  run_.unit_steps.assign(registry_->units.size(), 0);
  committed_ = true;
  start_progress();
  trace_->begin_step(run_.steps + 1);
  return Ok();
}

// Parts of a model have params of their own, and one run's settings.
Status Engine::agree_on_model() {
  std::vector<Consensus::Value> common = common_values();
  const Consensus::Value registered = {"the registered units, params and groups", registry_->fingerprint()};
  if (places_.parts() == 1) common.push_back(registered);
  STRATA_RETURN_IF_ERROR(consensus_.same(Among::kEveryone, common, "registration and settings"));
  if (places_.parts() == 1) return Ok();
  return consensus_.all_ok(Among::kEveryone, consensus_.same(Among::kGroup, {registered}, "registration"),
                           "registration");
}

// What decides which collectives a rank issues, how large they are, and how weights that ranks share are updated.
std::vector<Consensus::Value> Engine::common_values() const {
  const ZeroSettings& zero = settings_.zero_optimization;
  const auto number = [](auto value) { return static_cast<uint64_t>(value); };
  const auto text = [](const std::string& value) { return fnv1a(value.data(), value.size()); };
  const auto bits = [](double value) { return std::bit_cast<uint64_t>(value); };
  const std::string z = "zero_optimization.";
  return {{z + "stage", number(zero.stage)},
          {z + "reduce_bucket_size", number(zero.reduce_bucket_size)},
          {z + "prefetch_bucket_size", number(zero.prefetch_bucket_size)},
          {z + "param_persistence_threshold", number(zero.param_persistence_threshold)},
          {z + "model_persistence_threshold", number(zero.model_persistence_threshold)},
          {z + "max_live_parameters", number(zero.max_live_parameters)},
          {z + "max_reuse_distance", number(zero.max_reuse_distance)},
          {z + "accumulate_locally", number(zero.accumulate_locally)},
          {z + "offload_param.device", number(zero.offload_param.device)},
          {"train_batch_size", number(settings_.train_batch_size)},
          {"train_micro_batch_size_per_gpu", number(settings_.train_micro_batch_size_per_gpu)},
          {"gradient_accumulation_steps", number(settings_.gradient_accumulation_steps)},
          {"communication_data_type", number(settings_.communication_data_type)},
          {"gradient_clipping", bits(settings_.gradient_clipping)},
          {"check_weights", number(settings_.check_weights)},
          {z + "gather_16bit_weights_on_model_save", number(zero.gather_16bit_weights_on_model_save)},
          {"optimizer.type", text(settings_.optimizer.type)},
          {"optimizer.params.lr", bits(settings_.optimizer.lr)},
          {"optimizer.params.eps", bits(settings_.optimizer.eps)},
          {"optimizer.params.weight_decay", bits(settings_.optimizer.weight_decay)},
          {"optimizer.params.betas[0]", bits(settings_.optimizer.betas[0])},
          {"optimizer.params.betas[1]", bits(settings_.optimizer.betas[1])},
          {"optimizer.params.adam_w_mode", number(settings_.optimizer.adam_w_mode)},
          {"optimizer.params.state_layout", text(settings_.optimizer.state_layout)},
          {"plugins.optimizer", text(settings_.plugins.optimizer)},
          {"plugins.checkpoint", text(settings_.plugins.checkpoint)}};
}

// Where what is kept of `tier` lies in host memory; NULL where all of that tier is in memory.
const Tier* Engine::kept_tier(const Tier& tier) const { return tier.addressable() ? nullptr : kept_tier_.get(); }

void Engine::build_parts() {
  const ZeroSettings& zero = settings_.zero_optimization;
  const auto on_failure = [this](const Status& status) { note_failure(status); };
  trace_ = make_trace();
  queue_ = std::make_unique<CommQueue>(device_, Comms{group(), collective_, places_}, deadline_, counters_, *trace_,
                                       bound_to_, on_failure);
  weights_ =
      std::make_unique<Weights>(layout_, settings_, device_, group(), *queue_,
                                Weights::Tiers{*weight_tier_, kept_tier(*weight_tier_)}, deadline_, counters_, *trace_);
  state_places_ = std::make_unique<StatePlaces>(device_, *device_tier_, *state_tier_, kept_tier(*state_tier_),
                                                layout_.units.size());
  gradients_ = std::make_unique<Gradients>(*registry_, layout_, zero, GradientPlan::of(settings_), device_, group(),
                                           *queue_, *state_places_, *weights_, counters_, *trace_,
                                           lender_.lend ? &lender_ : nullptr, host_device_, bound_to_);
  agreement_ = std::make_unique<Agreement>(*registry_, layout_, *queue_, *gradients_, counters_);
  const States::Optimizers optimizers = {&optimizer_, device_optimizer_ ? &device_optimizer_ : nullptr};
  states_ = std::make_unique<States>(layout_, device_, optimizers, *state_places_, *weights_);
  tensors_ =
      std::make_unique<Tensors>(*registry_, layout_, device_, group(), *queue_, *weights_, *gradients_, *states_);
  updater_ = std::make_unique<Updater>(
      *registry_, layout_, settings_, device_, *gradients_, *weights_, *states_, deadline_, counters_, *trace_,
      bound_to_, [queue = queue_.get()](const Status& status) { queue->fail(status); },
      [this](strata_log_level level, const std::string& text) { log(level, text); });
}

std::unique_ptr<Trace> Engine::make_trace() {
  std::vector<std::string> units;
  for (const Unit& unit : layout_.units) units.push_back(unit.name);
  std::unique_ptr<TraceFile> file;
  ++traces_;
  if (!settings_.trace.path.empty()) {
    file = std::make_unique<TraceFile>(settings_.resolve(settings_.trace.path),
                                       "rank" + std::to_string(places_.world.rank), traces_);
  }
  return std::make_unique<Trace>(settings_, std::move(file), places_.world.rank, device_, units,
                                 [this](strata_log_level level, const std::string& text) { log(level, text); });
}

// The line of a step is rank 0's.
void Engine::start_progress() {
  Progress::Run run{0, 0, places_.world.size};
  if (places_.world.rank == 0 && host_->would_log(STRATA_LOG_INFO)) {
    run.every = static_cast<uint64_t>(settings_.steps_per_print);
  }
  for (uint32_t p = 0; p < registry_->params.size(); ++p) {
    run.params += registry_->params[p].owner == p ? registry_->params[p].numel : 0;
  }
  const std::vector<const Tier*> tiers = {state_tier_.get(), weight_tier_.get()};
  progress_ = std::make_unique<Progress>(run, device_, tiers, plan_, counters_.snapshot(),
                                         [this](const std::string& line) { log(STRATA_LOG_INFO, line); });
}

// Which units keep their state on the device, where the rest is offloaded; and of those that do not, which keep fp32
// sums of gradients there. A ratio is one of state alone.
Status Engine::place_states() {
  STRATA_RETURN_IF_ERROR(states_->declare());
  std::vector<uint64_t> bytes, sums;
  for (uint32_t u = 0; u < layout_.units.size(); ++u) bytes.push_back(states_->bytes_of(u));
  const OffloadOptimizerSettings& offload = settings_.zero_optimization.offload_optimizer;
  const double all = static_cast<double>(std::accumulate(bytes.begin(), bytes.end(), uint64_t{0}));
  const auto rest = static_cast<uint64_t>(std::llround(all * (1 - offload.ratio)));
  const uint64_t left =
      state_places_->choose(bytes, std::max(rest, static_cast<uint64_t>(offload.device_state_budget)));
  for (uint32_t u = 0; u < layout_.units.size(); ++u) sums.push_back(gradients_->memory().sum_bytes(u));
  state_places_->choose_sums(sums, offload.ratio < 1 ? 0 : left);
  state_places_->keep_in_memory(bytes, states_->sizes(), static_cast<uint64_t>(offload.cpu_state_budget));
  if (offload.split_update && offload.split_share >= 0) state_places_->stream(states_->sizes(), offload.split_share);
  return Ok();
}

namespace {
// A share that is measured may come to be any of it.
States::Streams streams_of(const OffloadOptimizerSettings& offload) {
  if (!offload.split_update) return States::Streams::kNothing;
  return offload.split_share < 0 ? States::Streams::kAny : States::Streams::kFront;
}
}  // namespace

Status Engine::make_plan() {
  STRATA_RETURN_IF_ERROR(place_states());
  STRATA_RETURN_IF_ERROR(weights_->check_limits());
  plan_ = {};
  const bool streams = device_.is_asynchronous();
  const OffloadOptimizerSettings& offload = settings_.zero_optimization.offload_optimizer;
  const bool pins = offload.pin_memory || settings_.zero_optimization.offload_param.pin_memory;
  weights_->add_to(&plan_, pins);
  const uint64_t own = plan_.in(kDeviceTier);
  gradients_->add_to(&plan_, pins);
  const uint64_t with = plan_.in(kDeviceTier), lent = lender_.lend ? with - own : 0;
  for (TierKind tier : {kDeviceTier, kCpuTier, kNvmeTier}) {
    plan_.add("optimizer state", tier, states_->bytes(tier), false, kept_state(tier));
  }
  if (pins && streams_of(offload) != States::Streams::kNothing) {
    const bool any = streams_of(offload) == States::Streams::kAny;
    plan_.pin("optimizer state", kCpuTier, any ? states_->bytes(kCpuTier) : states_->front_bytes());
  }
  plan_.add("state staging", kDeviceTier, states_->visit_bytes(false));
  plan_.add("state staging (host side)", streams ? kCpuTier : kDeviceTier, states_->visit_bytes(true), streams);
  plan_.add("weights between disk and device", kCpuTier, states_->bounce_bytes(), true);
  updater_->add_to(&plan_);
  plan_.add("tensor staging", kDeviceTier, Tensors::kStagingBytes);
  plan_.add("tensor staging (host side)", streams ? kCpuTier : kDeviceTier, Tensors::kPieceBytes, streams);
  plan_.add("trace", kCpuTier, trace_->bytes());
  for (const Tier* tier : {state_tier_.get(), weight_tier_.get()}) {
    plan_.set(std::string(tier_name(tier->kind())) + " index and buffers", kCpuTier,
              tier->own_bytes(plan_.in(tier->kind())));
  }
  const char* const words[] = {"none", "cpu", "nvme"};
  const ZeroSettings& zero = settings_.zero_optimization;
  log(STRATA_LOG_INFO, "rank " + std::to_string(places_.world.rank) + " of " + std::to_string(places_.world.size) +
                           (places_.parts() == 1 ? "" : ", " + places_.text()) + ", ZeRO stage " +
                           std::to_string(zero.stage) + ", optimizer offload " +
                           words[static_cast<int>(zero.offload_optimizer.device)] + ", param offload " +
                           words[static_cast<int>(zero.offload_param.device)]);
  // The plan is the same on every rank of a pipeline stage; one of them is enough to read.
  const bool first = places_.data.rank == 0 && places_.tensor.rank == 0;
  const strata_log_level level = first ? STRATA_LOG_INFO : STRATA_LOG_DEBUG;
  for (const std::string& line : plan_.lines()) log(level, "plan: " + line);
  if (first) warn_of_no_split();
  STRATA_RETURN_IF_ERROR(check_device_memory(lent));
  for (const Tier* tier : {state_tier_.get(), weight_tier_.get()}) {
    if (tier->kind() != kNvmeTier) continue;
    STRATA_RETURN_IF_ERROR(plan_.check_disk(places_.world.rank, tier->budget(), tier->budget_reason()));
  }
  warn_of_idle_tiers();
  return plan_.check_host(!device_.is_asynchronous(), local_world_, settings_.host_memory_limit);
}

namespace {
std::string what_keeps(const Settings& settings, TierKind tier) {
  const bool by_ratio = settings.zero_optimization.offload_optimizer.ratio < 1;
  const std::string key = tier == kCpuTier ? "cpu_state_budget" : by_ratio ? "ratio" : "device_state_budget";
  return key + " = " + value_in_words(settings, "zero_optimization.offload_optimizer." + key);
}
}  // namespace

// What keeps optimizer state in `tier`, which is not the one it is offloaded to, and how much; "" where that is it.
std::string Engine::kept_state(TierKind tier) const {
  if (tier == state_tier_->kind() || states_->bytes(tier) == 0) return "";
  const uint64_t all = states_->bytes(kDeviceTier) + states_->bytes(kCpuTier) + states_->bytes(kNvmeTier);
  return kept_note(states_->bytes(tier), all, what_keeps(settings_, tier));
}

// Why nothing is left for the tier that optimizer state is offloaded to.
std::string Engine::why_no_state() const {
  std::string why;
  for (const auto& [tier, place] : {std::pair{kDeviceTier, "on the device"}, {kCpuTier, "in host memory"}}) {
    if (kept_state(tier).empty()) continue;
    why += (why.empty() ? "" : " and ") + what_keeps(settings_, tier) + " keeps optimizer state " + place;
  }
  return why.empty() ? "no param is trained" : why;
}

void Engine::warn_of_no_split() const {
  if (!settings_.zero_optimization.offload_optimizer.split_update || states_->bytes(kCpuTier) > 0) return;
  log(STRATA_LOG_WARN, "zero_optimization.offload_optimizer.split_update has nothing to split: " + why_no_state());
}

// Where the device says how much is free. `lent`: of the plan, what the host lends.
Status Engine::check_device_memory(uint64_t lent) {
  strata_device_caps caps;
  STRATA_RETURN_IF_ERROR(device_.inspect(&caps));
  const uint64_t need = plan_.in(kDeviceTier);
  if (!device_.is_asynchronous() || caps.total_bytes == 0 || need - lent <= caps.free_bytes) return Ok();
  return {STRATA_RESOURCE_EXHAUSTED, "device \"" + settings_.plugins.device + "\" has " + bytes_text(caps.free_bytes) +
                                         " free of " + bytes_text(caps.total_bytes) + "; " + device_need()};
}

// The numbers, and the settings that could make them less.
std::string Engine::device_need() const {
  const ZeroSettings& zero = settings_.zero_optimization;
  const OffloadOptimizerSettings& offload = zero.offload_optimizer;
  std::string keys;
  const auto name = [&](bool counts, const std::string& key) {
    if (!counts) return;
    keys += (keys.empty() ? "" : ", ") + key + " (" + value_in_words(settings_, "zero_optimization." + key) + ")";
  };
  name(offload.device_state_budget > 0, "offload_optimizer.device_state_budget");
  name(offload.ratio < 1, "offload_optimizer.ratio");
  name(offload.split_update, "offload_optimizer.split_update");
  name(offload.device == OffloadDevice::kNone, "offload_optimizer.device");
  name(zero.stage == 3 && zero.offload_param.device == OffloadDevice::kNone, "offload_param.device");
  name(zero.stage == 3, "max_live_parameters");
  name(zero.stage < 3, "stage");
  name(true, "reduce_bucket_size");
  return "the plan needs " + bytes_text(plan_.in(kDeviceTier)) + " of device memory, " +
         bytes_text(states_->bytes(kDeviceTier)) +
         " of it for optimizer state, by these settings of zero_optimization: " + keys;
}

// A tier that was asked for and holds nothing, and host memory that was given and keeps nothing.
void Engine::warn_of_idle_tiers() const {
  if (const std::string weights = weights_->idle_note(); !weights.empty()) log(STRATA_LOG_WARN, weights);
  const OffloadOptimizerSettings& state = settings_.zero_optimization.offload_optimizer;
  if (state.device != OffloadDevice::kNvme) return;
  if (states_->bytes(kNvmeTier) == 0) {
    log(STRATA_LOG_WARN, "no optimizer state on disk: " + why_no_state());
  } else if (state.cpu_state_budget > 0 && states_->bytes(kCpuTier) == 0) {
    log(STRATA_LOG_WARN, "zero_optimization.offload_optimizer." + what_keeps(settings_, kCpuTier) +
                             " keeps no optimizer state: it is less than the least part");
  }
}

// What the device did not say, or takes beside what it is asked for, shows here.
Status Engine::allocate() {
  const Status all = allocate_parts();
  if (all.code() != STRATA_RESOURCE_EXHAUSTED || !device_.is_asynchronous()) return all;
  return {all.code(), all.text() + "; " + device_need()};
}

Status Engine::allocate_parts() {
  const MemoryNear near(settings_.bind_threads ? cores_.node : -1);
  STRATA_RETURN_IF_ERROR(weights_->allocate(bound_to_));
  STRATA_RETURN_IF_ERROR(gradients_->allocate());
  STRATA_RETURN_IF_ERROR(states_->allocate(streams_of(settings_.zero_optimization.offload_optimizer)));
  STRATA_RETURN_IF_ERROR(updater_->allocate());
  STRATA_RETURN_IF_ERROR(trace_->allocate());
  return tensors_->allocate();
}

}  // namespace strata
