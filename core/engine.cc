// engine.cc - one rank's engine between open and close: registration and plan, the step, tensors and checkpoints,
// questions, guards. The step is the part to read; how an engine comes up is in engine_open.cc.
#include "core/engine.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "core/hash.h"
#include "core/manifest/manifest_keys.h"

namespace strata {

using Among = Agreement::Among;

Engine::~Engine() { take_down(); }

// Threads first: the update under way is finished, then the collective thread leaves.
void Engine::take_down() {
  if (queue_) queue_->release_device();
  updater_.reset();
  queue_.reset();
  snapshot_.reset();
  tensors_.reset();
  states_.reset();
  agreement_.reset();
  gradients_.reset();
  state_places_.reset();
  weights_.reset();
  progress_.reset();
  trace_.reset();  // written now, if it was not yet
}

// ---- registering and planning ------------------------------------------------------------------------------------

Status Engine::add_group(const strata_group_args& args, uint32_t* out) {
  STRATA_RETURN_IF_ERROR(usable(false));
  STRATA_RETURN_IF_ERROR(registry_->add_group(args, out));
  float scalars[STRATA_OPTIM_SCALARS];
  return optimizer_.scalars(registry_->groups.back(), 1, scalars).during("group " + std::to_string(*out));
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
  layout_ = make_layout(*registry_, static_cast<int>(zero.stage), places_,
                        static_cast<uint64_t>(zero.param_persistence_threshold), weight_tier_->kind() != kDeviceTier);
  build_parts();
  STRATA_RETURN_IF_ERROR(queue_->create_streams());
  STRATA_RETURN_IF_ERROR(agree_on_model());
  STRATA_RETURN_IF_ERROR(agreement_->all_ok(Among::kEveryone, make_plan(), "memory plan"));
  STRATA_RETURN_IF_ERROR(agreement_->all_ok(Among::kEveryone, allocate(), "allocation"));
  run_.unit_steps.assign(registry_->units.size(), 0);
  committed_ = true;
  start_progress();
  trace_->begin_step(run_.steps + 1);
  return Ok();
}

// Parts of a model have params of their own, and one run's settings.
Status Engine::agree_on_model() {
  std::vector<Agreement::Value> common = common_values();
  const Agreement::Value registered = {"the registered units, params and groups", registry_->fingerprint()};
  if (places_.parts() == 1) common.insert(common.begin(), registered);
  STRATA_RETURN_IF_ERROR(agreement_->same(Among::kEveryone, common, "registration and settings"));
  if (places_.parts() == 1) return Ok();
  return agreement_->all_ok(Among::kEveryone, agreement_->same(Among::kGroup, {registered}, "registration"),
                            "registration");
}

// What decides which collectives a rank issues, how large they are, and how weights that ranks share are updated.
std::vector<Agreement::Value> Engine::common_values() const {
  const ZeroSettings& zero = settings_.zero_optimization;
  const auto number = [](auto value) { return static_cast<uint64_t>(value); };
  const auto text = [](const std::string& value) { return fnv1a(value.data(), value.size()); };
  const std::string z = "zero_optimization.";
  return {{z + "stage", number(zero.stage)},
          {z + "reduce_bucket_size", number(zero.reduce_bucket_size)},
          {z + "prefetch_bucket_size", number(zero.prefetch_bucket_size)},
          {z + "param_persistence_threshold", number(zero.param_persistence_threshold)},
          {z + "max_live_parameters", number(zero.max_live_parameters)},
          {z + "max_reuse_distance", number(zero.max_reuse_distance)},
          {z + "accumulate_locally", number(zero.accumulate_locally)},
          {z + "offload_param.device", number(zero.offload_param.device)},
          {"gradient_accumulation_steps", number(settings_.gradient_accumulation_steps)},
          {"communication_data_type", number(settings_.communication_data_type)},
          {"gradient_clipping", std::bit_cast<uint64_t>(settings_.gradient_clipping)},
          {"check_weights", number(settings_.check_weights)},
          {z + "gather_16bit_weights_on_model_save", number(zero.gather_16bit_weights_on_model_save)},
          {"optimizer.type", text(settings_.optimizer.type)},
          {"optimizer.params.adam_w_mode", number(settings_.optimizer.adam_w_mode)},
          {"optimizer.params.state_layout", text(settings_.optimizer.state_layout)},
          {"plugins.optimizer", text(settings_.plugins.optimizer)},
          {"plugins.checkpoint", text(settings_.plugins.checkpoint)}};
}

void Engine::build_parts() {
  const ZeroSettings& zero = settings_.zero_optimization;
  const auto on_failure = [this](const Status& status) { note_failure(status); };
  trace_ = make_trace();
  queue_ = std::make_unique<CommQueue>(device_, Comms{group(), collective_, places_}, deadline_, counters_, *trace_,
                                       bound_to_, on_failure);
  weights_ = std::make_unique<Weights>(layout_, zero, device_, group(), *queue_, *weight_tier_, settings_.check_weights,
                                       counters_, *trace_);
  GradientPlan gradients;
  gradients.micro_batches = static_cast<int>(settings_.gradient_accumulation_steps);
  gradients.local = gradients.micro_batches > 1 && (zero.stage < 2 || zero.accumulate_locally);
  gradients.communication_dtype = settings_.communication_data_type;
  state_places_ = std::make_unique<StatePlaces>(device_, *device_tier_, *state_tier_, layout_.units.size());
  gradients_ =
      std::make_unique<Gradients>(*registry_, layout_, zero, gradients, device_, group(), *queue_, *state_places_,
                                  *weights_, counters_, *trace_, lender_.lend ? &lender_ : nullptr);
  agreement_ = std::make_unique<Agreement>(*registry_, layout_, *queue_, *gradients_, counters_);
  const States::Optimizers optimizers = {&optimizer_, device_optimizer_ ? &device_optimizer_ : nullptr};
  states_ = std::make_unique<States>(layout_, device_, optimizers, *state_places_, *weights_);
  tensors_ =
      std::make_unique<Tensors>(*registry_, layout_, device_, group(), *queue_, *weights_, *gradients_, *states_);
  updater_ = std::make_unique<Updater>(
      *registry_, layout_, zero, device_, *gradients_, *weights_, *states_, deadline_, counters_, *trace_, bound_to_,
      [this, queue = queue_.get()](const Status& status) {
        note_failure(status);
        queue->fail({status.code(), "rank " + std::to_string(places_.world.rank) + ": " + status.text()});
      },
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
  progress_ = std::make_unique<Progress>(run, device_, plan_, counters_.snapshot(),
                                         [this](const std::string& line) { log(STRATA_LOG_INFO, line); });
}

// Which units keep their state on the device, where the rest is offloaded.
Status Engine::place_states() {
  STRATA_RETURN_IF_ERROR(states_->declare());
  std::vector<uint64_t> bytes;
  for (uint32_t u = 0; u < layout_.units.size(); ++u) bytes.push_back(states_->bytes_of(u));
  const OffloadOptimizerSettings& offload = settings_.zero_optimization.offload_optimizer;
  const double all = static_cast<double>(std::accumulate(bytes.begin(), bytes.end(), uint64_t{0}));
  const auto rest = static_cast<uint64_t>(std::llround(all * (1 - offload.ratio)));
  state_places_->choose(bytes, std::max(rest, static_cast<uint64_t>(offload.device_state_budget)));
  return Ok();
}

Status Engine::make_plan() {
  STRATA_RETURN_IF_ERROR(place_states());
  STRATA_RETURN_IF_ERROR(weights_->check_limits());
  const TierKind weight = weight_tier_->kind();
  plan_ = {};
  const bool streams = device_.is_asynchronous();
  const OffloadOptimizerSettings& offload = settings_.zero_optimization.offload_optimizer;
  const bool pins = offload.pin_memory || settings_.zero_optimization.offload_param.pin_memory;
  plan_.add("whole weights", kDeviceTier, weights_->whole_bytes());
  plan_.add("weight shards", weight, weights_->shard_bytes(), pins && weight == kCpuTier);
  plan_.add("weight slabs", kDeviceTier, weights_->slab_bytes());
  plan_.add("weight shard staging", kDeviceTier, weights_->staging_bytes());
  plan_.add("copies of check_weights", kCpuTier, weights_->copy_bytes());
  gradients_->memory().add_to(&plan_, pins);
  for (TierKind tier : {kDeviceTier, kCpuTier, kNvmeTier}) {
    plan_.add("optimizer state", tier, states_->bytes(tier), pins && tier == kCpuTier);
  }
  updater_->add_to(&plan_);
  plan_.add("tensor staging", kDeviceTier, Tensors::kStagingBytes);
  plan_.add("tensor staging (host side)", streams ? kCpuTier : kDeviceTier, Tensors::kPieceBytes, streams);
  plan_.add("trace", kCpuTier, trace_->bytes());
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
  return plan_.check_host(!device_.is_asynchronous(), local_world_, settings_.host_memory_limit);
}

Status Engine::allocate() {
  const MemoryNear near(settings_.bind_threads ? cores_.node : -1);
  STRATA_RETURN_IF_ERROR(weights_->allocate());
  STRATA_RETURN_IF_ERROR(gradients_->allocate());
  STRATA_RETURN_IF_ERROR(states_->allocate());
  STRATA_RETURN_IF_ERROR(updater_->allocate());
  STRATA_RETURN_IF_ERROR(trace_->allocate());
  return tensors_->allocate();
}

// ---- the step ----------------------------------------------------------------------------------------------------

namespace {
// What the host does, as far as its calls show it.
constexpr char kForward[] = "forward", kBackward[] = "backward";
}  // namespace

Status Engine::fetch(uint32_t unit, const strata_stream* stream) {
  STRATA_RETURN_IF_ERROR(usable());
  STRATA_RETURN_IF_ERROR(known_unit(unit));
  STRATA_RETURN_IF_ERROR(check_stream(&stream));
  if (!trace_->phase()) trace_->phase(kForward);
  const Span span(trace_->host, "fetch", unit, &trace_->timings.fetch_wait);
  STRATA_RETURN_IF_ERROR(weights_->fetch(unit, stream));
  gradients_->note_fetch(unit, stream);
  return Ok();
}

Status Engine::release(uint32_t unit, const strata_stream* stream) {
  STRATA_RETURN_IF_ERROR(usable());
  STRATA_RETURN_IF_ERROR(known_unit(unit));
  STRATA_RETURN_IF_ERROR(check_stream(&stream));
  if (!settings_.check_weights) return weights_->release(unit, stream);
  const Status unwritten = undo_write(unit, stream);
  STRATA_RETURN_IF_ERROR(weights_->release(unit, stream));
  return agreement_->all_ok(Among::kGroup, unwritten,
                            "check_weights at the release of unit \"" + layout_.units[unit].name + "\"");
}

Status Engine::undo_write(uint32_t unit, const strata_stream* stream) {
  std::optional<Weights::Written> written;
  STRATA_RETURN_IF_ERROR(weights_->undo_write(unit, stream, &written));
  if (!written) return Ok();
  const Segment& segment = layout_.units[written->unit].segments[written->segment];
  const std::string param = param_at(*registry_, segment, written->element);
  return {STRATA_FAILED_PRECONDITION,
          (param.empty() ? "padding behind the params" : "param \"" + param + "\"") + " of unit \"" +
              layout_.units[unit].name +
              "\" was written between fetch and release, where it is read-only; its old values are back (change "
              "weights with strata_write_param)"};
}

Status Engine::view(uint32_t param, strata_tensor* out) {
  STRATA_RETURN_IF_ERROR(known_param(param));
  const Param& p = registry_->params[param];
  out->data = committed_ ? weights_->address(registry_->owner_of(param)) : nullptr;
  out->device_type = device_.type();
  out->device_id = device_.id();
  out->dtype = p.dtype;
  out->ndim = static_cast<int32_t>(p.shape.size());
  out->shape = p.shape.data();
  if (out->data) return Ok();
  return {STRATA_FAILED_PRECONDITION, "param \"" + p.name + "\" is not fetched: it has no readable data"};
}

Status Engine::params_of(uint32_t unit, const std::vector<uint32_t>** out) const {
  STRATA_RETURN_IF_ERROR(known_unit(unit));
  *out = &registry_->units[unit].params;
  return Ok();
}

Status Engine::grads(const uint32_t* params, const std::vector<strata_tensor>& grads, const strata_stream* stream) {
  STRATA_RETURN_IF_ERROR(usable());
  for (size_t i = 0; i < grads.size(); ++i) STRATA_RETURN_IF_ERROR(known_param(params[i]));
  STRATA_RETURN_IF_ERROR(check_stream(&stream));
  STRATA_RETURN_IF_ERROR(settle());
  trace_->phase(kBackward);
  const uint32_t unit = grads.empty() ? kNoUnit : registry_->params[params[0]].unit;
  const Span span(trace_->host, "fold", unit, &trace_->timings.fold);
  return gradients_->add(params, grads, stream);
}

Status Engine::grads_done(uint32_t unit) {
  STRATA_RETURN_IF_ERROR(usable());
  STRATA_RETURN_IF_ERROR(known_unit(unit));
  STRATA_RETURN_IF_ERROR(settle());
  trace_->phase(kBackward);
  const Span span(trace_->host, "gradients done", unit);
  return gradients_->unit_done(unit);
}

Status Engine::end_backward() {
  STRATA_RETURN_IF_ERROR(usable());
  STRATA_RETURN_IF_ERROR(settle());
  trace_->phase(kBackward);
  Status status;
  {
    const Span span(trace_->host, "end of backward");
    status = gradients_->end_backward();
  }
  trace_->phase(nullptr);
  return status;
}

Status Engine::drop_gradients() {
  STRATA_RETURN_IF_ERROR(usable());
  STRATA_RETURN_IF_ERROR(settle());
  trace_->phase(nullptr);
  const Span span(trace_->host, "drop gradients");
  STRATA_RETURN_IF_ERROR(gradients_->drop());
  return queue_->flush();  // they may be in memory that the next gradient is written to
}

Status Engine::step(const strata_step_args* args) {
  STRATA_RETURN_IF_ERROR(usable());
  trace_->phase(nullptr);
  Status status;
  {
    const Span span(trace_->host, "step");
    status = try_step(args);
  }
  trace_->begin_step(run_.steps + 1);
  return status;
}

// The whole of ZeRO's step: agree on the norm, mark every unit as being updated, hand the work to the update thread.
Status Engine::try_step(const strata_step_args* args) {
  const int done = gradients_->micro_batches_done(), all = gradients_->plan().micro_batches;
  if (done != all || gradients_->filling()) {
    return {STRATA_FAILED_PRECONDITION, "strata_step: " + std::to_string(done) + " of " + std::to_string(all) +
                                            " micro-batches (gradient_accumulation_steps) have ended with "
                                            "strata_end_backward since the last step"};
  }
  if (weights_->any_fetched()) {
    return {STRATA_FAILED_PRECONDITION, "strata_step: a unit is still fetched; release it first"};
  }
  double max_norm = 0;
  STRATA_RETURN_IF_ERROR(step_max_norm(args, &max_norm));
  STRATA_RETURN_IF_ERROR(settle());
  UpdateJob job;
  job.groups = step_groups(args);
  for (size_t g = 0; g < job.groups.size(); ++g) {
    float scalars[STRATA_OPTIM_SCALARS];
    const Status fine = optimizer_.scalars(job.groups[g], 1, scalars);
    STRATA_RETURN_IF_ERROR(fine.during("strata_step, group " + std::to_string(g)));
  }
  STRATA_RETURN_IF_ERROR(weights_->end_step());
  job.step = ++run_.steps;
  const uint64_t rates = fnv1a(job.groups.data(), job.groups.size() * sizeof(job.groups[0]));
  const uint64_t limit = fnv1a(&max_norm, sizeof(max_norm));
  outcome_ = job.outcome = agreement_->submit(job.step, max_norm, fnv1a(&max_norm, sizeof(max_norm), rates),
                                              fnv1a(&job.groups[0], sizeof(job.groups[0]), limit));
  settled_ = false;
  for (uint32_t unit : weights_->forward_order()) {
    if (layout_.units[unit].trainable_elements == 0) continue;
    job.units.push_back(unit);
    job.updated.push_back(Work::create());
    weights_->begin_update(unit, job.updated.back(), &job.after.emplace_back());
  }
  job.traced = trace_->host.step();
  job.ends_trace = trace_->ends_with(job.step);
  if (const auto line = progress_->step(job.step, job.groups[0].lr, args)) {
    job.on_known = [this, line](const StepOutcome& outcome) { progress_->print(*line, outcome); };
  }
  gradients_->begin_step(job.units);
  updater_->submit(std::move(job));
  outcome_->host_counted = counters_.snapshot();
  log_breakdown();
  return Ok();
}

void Engine::log_breakdown() {
  const auto every = static_cast<uint64_t>(settings_.steps_per_print);
  if (!settings_.wall_clock_breakdown || every == 0 || run_.steps % every != 0) return;
  log(STRATA_LOG_INFO, "rank " + std::to_string(places_.world.rank) + " step " + std::to_string(run_.steps) +
                           ", per step (parts overlap): " + trace_->timings.take(every));
}

Status Engine::check_group_count(uint64_t count) const {
  if (count == registry_->groups.size()) return Ok();
  return {STRATA_INVALID_ARGUMENT, "strata_step: group_count is " + std::to_string(count) + ", there are " +
                                       std::to_string(registry_->groups.size()) +
                                       " param groups (group 0 is the manifest's)"};
}

// A group follows the step's learning rate unless it, or the step for it, gave its own.
std::vector<strata_optim_group> Engine::step_groups(const strata_step_args* args) const {
  std::vector<strata_optim_group> groups = registry_->groups;
  for (size_t g = 0; args && g < groups.size(); ++g) {
    if (!registry_->group_has_lr[g] && !std::isnan(args->lr)) groups[g].lr = args->lr;
    if (args->group_lr && !std::isnan(args->group_lr[g])) groups[g].lr = args->group_lr[g];
    if (args->groups) Registry::set_given(args->groups[g], &groups[g]);
  }
  return groups;
}

// A step's own max_norm is as good as the manifest's gradient_clipping.
Status Engine::step_max_norm(const strata_step_args* args, double* out) const {
  const bool given = args && args->max_norm != 0 && !std::isnan(args->max_norm);
  *out = given ? args->max_norm : settings_.gradient_clipping;
  if (std::isinf(*out) && *out > 0) *out = 0;  // as a manifest says it: ranks compare the number
  if (*out >= 0) return Ok();
  return {STRATA_INVALID_ARGUMENT, "strata_step: max_norm is " + std::to_string(*out) +
                                       "; a norm above 0, infinity (do not clip), or 0 or NaN (gradient_clipping)"};
}

// Takes in what the last step decided, once: before the first bucket of the next step, so that every rank cuts its
// buckets by the same order.
Status Engine::settle() {
  if (settled_) return Ok();
  {
    const Span wait(trace_->host, "wait for agreement", kNoUnit, nullptr, !outcome_->known.is_set());
    STRATA_RETURN_IF_ERROR(outcome_->known.wait_enqueued(queue_->patience()));
  }
  settled_ = true;
  ++(outcome_->apply ? run_.applied : run_.skipped);
  before_last_step_ = at_last_step_;
  at_last_step_ = outcome_->counted;
  // Fetches are counted by the host thread, which may be in the next step when the collective thread takes the rest.
  at_last_step_.fetches = outcome_->host_counted.fetches;
  at_last_step_.prefetch_hits = outcome_->host_counted.prefetch_hits;
  at_last_step_.prefetch_dropped = outcome_->host_counted.prefetch_dropped;
  gradients_->set_order(outcome_->order);
  return Ok();
}

Status Engine::wait() {
  STRATA_RETURN_IF_ERROR(usable());
  STRATA_RETURN_IF_ERROR(updater_->join());
  return settle();
}

Status Engine::step_info(strata_step_info* out) {
  if (outcome_) STRATA_RETURN_IF_ERROR(settle());
  out->steps = run_.steps;
  out->applied_steps = run_.applied;
  out->skipped_steps = run_.skipped;
  out->grad_norm = outcome_ ? outcome_->norm : 0;
  out->clip_factor = outcome_ ? outcome_->clip : 1;
  out->was_applied = outcome_ ? outcome_->apply : 0;
  return Ok();
}

// ---- tensors and checkpoints -------------------------------------------------------------------------------------

// Joins the update; refused while gradients of an unfinished step wait.
Status Engine::between_steps(const std::string& what) {
  STRATA_RETURN_IF_ERROR(usable());
  STRATA_RETURN_IF_ERROR(updater_->join());
  STRATA_RETURN_IF_ERROR(settle());
  if (gradients_->filling() || gradients_->micro_batches_done() > 0) {
    return {STRATA_FAILED_PRECONDITION, what + ": " + std::to_string(gradients_->micro_batches_done()) +
                                            " micro-batches of an unfinished step are in; call it after strata_step"};
  }
  run_.unit_steps = updater_->unit_steps;
  return Ok();
}

Status Engine::write_param(uint32_t param, const strata_tensor* value, int32_t root) {
  STRATA_RETURN_IF_ERROR(usable());
  STRATA_RETURN_IF_ERROR(known_param(param));
  const Progress::Pause pause(progress_.get());
  const std::string what = "strata_write_param(\"" + registry_->params[param].name + "\")";
  if (weights_->any_fetched()) return {STRATA_FAILED_PRECONDITION, what + ": a unit is still fetched"};
  STRATA_RETURN_IF_ERROR(between_steps(what));
  STRATA_RETURN_IF_ERROR(agreement_->all_ok(Among::kGroup, tensors_->check_write(param, value, root), what));
  STRATA_RETURN_IF_ERROR(weights_->wait_for_readers());
  return tensors_->write(param, value, root).during(what);
}

Status Engine::read_param(uint32_t param, const char* array, const strata_tensor& out) {
  STRATA_RETURN_IF_ERROR(usable());
  STRATA_RETURN_IF_ERROR(known_param(param));
  const Progress::Pause pause(progress_.get());
  STRATA_RETURN_IF_ERROR(updater_->join());
  const std::string name = array ? array : "weight",
                    what = "strata_read_param(\"" + registry_->params[param].name + "\")";
  if (name == "grad" && gradients_->filling()) {
    return {STRATA_FAILED_PRECONDITION, what + ": a micro-batch is open; gradients are reduced when it ends"};
  }
  const int in = gradients_->micro_batches_done();
  if (name == "grad" && gradients_->plan().local && in > 0 && in < gradients_->plan().micro_batches) {
    return {STRATA_FAILED_PRECONDITION,
            what + ": gradients are added up on each rank and reduced after the last of the " +
                std::to_string(gradients_->plan().micro_batches) + " micro-batches, " + std::to_string(in) + " are in"};
  }
  STRATA_RETURN_IF_ERROR(agreement_->all_ok(Among::kGroup, tensors_->check_read(param, name, out), what));
  return tensors_->read(param, name, out).during(what);
}

namespace {
Status check_path(const char* text, const char* what) {
  return text && *text ? Ok() : Status(STRATA_INVALID_ARGUMENT, std::string(what) + " is empty");
}
}  // namespace

Status Engine::save(const char* root, const char* tag) {
  STRATA_RETURN_IF_ERROR(check_path(root, "root"));
  STRATA_RETURN_IF_ERROR(check_path(tag, "tag"));
  const Progress::Pause pause(progress_.get());
  STRATA_RETURN_IF_ERROR(between_steps("strata_save"));
  STRATA_RETURN_IF_ERROR(open_checkpoint());
  return snapshot_->save(root, tag, run_, settings_.zero_optimization.gather_16bit_weights_on_model_save);
}

Status Engine::load(const char* root, const char* tag) {
  STRATA_RETURN_IF_ERROR(check_path(root, "root"));
  STRATA_RETURN_IF_ERROR(recover());
  const Progress::Pause pause(progress_.get());
  STRATA_RETURN_IF_ERROR(between_steps("strata_load"));
  if (weights_->any_fetched()) return {STRATA_FAILED_PRECONDITION, "strata_load: a unit is still fetched"};
  STRATA_RETURN_IF_ERROR(open_checkpoint());
  STRATA_RETURN_IF_ERROR(weights_->wait_for_readers());
  bool changed = false;
  Status loaded = snapshot_->load(root, tag, &run_, &changed);
  if (!loaded.ok() && changed) note_failure(loaded);  // half loaded: only another load, or close
  if (!loaded.ok()) return loaded;
  updater_->unit_steps = run_.unit_steps;
  trace_->begin_step(run_.steps + 1);
  return Ok();
}

// A load replaces everything a failed update may have left half done. Alone, the engine can go on; with other ranks
// the collective has told them of the failure and is closed for good.
Status Engine::recover() {
  Status failed = usable();
  if (failed.ok() || !committed_) return failed;
  if (places_.world.size > 1)
    return failed.during("strata_load: close the engine on every rank, open it again, then load");
  (void)updater_->join();
  take_down();
  {
    std::lock_guard lock(failure_mutex_);
    failure_ = {};
  }
  outcome_.reset();
  settled_ = true;
  committed_ = false;
  return commit();
}

Status Engine::export_weights(const char* path) {
  STRATA_RETURN_IF_ERROR(check_path(path, "path"));
  const Progress::Pause pause(progress_.get());
  STRATA_RETURN_IF_ERROR(between_steps("strata_export_weights"));
  STRATA_RETURN_IF_ERROR(open_checkpoint());
  return snapshot_->export_weights(path);
}

Status Engine::set_meta(const char* key, const char* value) {
  STRATA_RETURN_IF_ERROR(check_path(key, "key"));
  if (!is_utf8(key) || (value && !is_utf8(value))) {
    return {STRATA_INVALID_ARGUMENT, "a meta key or value that is not UTF-8, as text in checkpoints must be"};
  }
  if (!value) {
    run_.meta.erase(key);
  } else {
    run_.meta[key] = value;
  }
  return Ok();
}

Status Engine::get_meta(const char* key, const char** value) {
  STRATA_RETURN_IF_ERROR(check_path(key, "key"));
  const auto it = run_.meta.find(key);
  if (it == run_.meta.end()) return {STRATA_NOT_FOUND, std::string("there is no meta value \"") + key + "\""};
  *value = it->second.c_str();
  return Ok();
}

// ---- questions ---------------------------------------------------------------------------------------------------

Status Engine::counters(strata_counter_span span, strata_counters* out) {
  if (span != STRATA_COUNT_TOTAL && span != STRATA_COUNT_LAST_STEP) {
    return {STRATA_INVALID_ARGUMENT, "there is no counter span " + std::to_string(span)};
  }
  if (span == STRATA_COUNT_LAST_STEP && outcome_) STRATA_RETURN_IF_ERROR(settle());
  *out = span == STRATA_COUNT_LAST_STEP ? minus(at_last_step_, before_last_step_) : counters_.snapshot();
  return Ok();
}

Status Engine::plan(strata_plan_item* items, uint64_t capacity, uint64_t* count) const {
  *count = plan_.items.size();
  for (uint64_t i = 0; i < std::min(capacity, *count); ++i) {
    items[i] = {sizeof(strata_plan_item), STRATA_ABI_MINOR, plan_.items[i].what.c_str(), plan_.items[i].tier, 0,
                plan_.items[i].bytes};
  }
  return Ok();
}

Status Engine::device_info(strata_device_info* out) {
  strata_device_caps caps;
  STRATA_RETURN_IF_ERROR(device_.inspect(&caps));
  out->type = caps.type;
  out->device_id = caps.device_id;
  out->total_bytes = caps.total_bytes;
  out->free_bytes = caps.free_bytes;
  out->held_bytes = committed_ ? plan_.in(kDeviceTier) : 0;
  return Ok();
}

Status Engine::setting(const char* key, const char** value) {
  std::string text;
  STRATA_RETURN_IF_ERROR(setting_text(settings_, key ? key : "", &text));
  *value = (setting_texts_[key] = text).c_str();
  return Ok();
}

Status Engine::plugin_interface(const std::string& role, const char* id, const void** table) {
  const PluginChoices& chosen = settings_.plugins;
  const std::map<std::string, std::string> roles = {
      {"device", chosen.device},           {"collective", chosen.collective},
      {"offload_cpu", chosen.offload_cpu}, {"offload_nvme", chosen.offload_nvme},
      {"optimizer", chosen.optimizer},     {"device_optimizer", chosen.device_optimizer},
      {"checkpoint", chosen.checkpoint}};
  const auto it = roles.find(role);
  if (it == roles.end()) return {STRATA_INVALID_ARGUMENT, "there is no plugin role \"" + role + "\""};
  return plugins_->find(it->second, id ? id : "", table);
}

// ---- guards ------------------------------------------------------------------------------------------------------

// The first error is the engine's. Collective and update thread; the collective queue tells the other ranks.
void Engine::note_failure(const Status& status) {
  {
    std::lock_guard lock(failure_mutex_);
    if (!failure_.ok()) return;
    failure_ = status;
  }
  log(STRATA_LOG_ERROR, "rank " + std::to_string(places_.world.rank) + " failed: " + status.text());
}

Status Engine::usable(bool committed) {
  {
    std::lock_guard lock(failure_mutex_);
    if (!failure_.ok()) return failure_.during("the engine has FAILED");
  }
  if (committed == committed_) return Ok();
  return {STRATA_FAILED_PRECONDITION, committed ? "call strata_commit first" : "registration ended with strata_commit"};
}

Status Engine::known_unit(uint32_t unit) const {
  if (unit < registry_->units.size()) return Ok();
  return {STRATA_INVALID_ARGUMENT,
          "there is no unit " + std::to_string(unit) + ", there are " + std::to_string(registry_->units.size())};
}

Status Engine::known_param(uint32_t param) const {
  if (param < registry_->params.size()) return Ok();
  return {STRATA_INVALID_ARGUMENT,
          "there is no param " + std::to_string(param) + ", there are " + std::to_string(registry_->params.size())};
}

// No stream, or one of the CPU, means: be done when the call returns.
Status Engine::check_stream(const strata_stream** stream) const {
  if (*stream && (*stream)->domain == STRATA_CPU) *stream = nullptr;
  if (!*stream || ((*stream)->domain == device_.type() && (*stream)->device_id == device_.id())) return Ok();
  return {STRATA_INVALID_ARGUMENT, "a stream of domain " + std::to_string((*stream)->domain) + ", device " +
                                       std::to_string((*stream)->device_id) + "; the engine's device is of domain " +
                                       std::to_string(device_.type()) + ", device " + std::to_string(device_.id())};
}

bool Engine::is_forked_child() const { return getpid() != pid_; }

void Engine::log(strata_log_level level, const std::string& text) const { host_->log(level, "strata", text); }

}  // namespace strata
