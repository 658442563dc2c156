// engine.cc - one rank's engine once it is committed: the step, tensors and checkpoints, questions, guards. The step is
// the part to read; how an engine comes up is in engine_open.cc, then engine_commit.cc.
#include "core/engine.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "core/hash.h"
#include "core/manifest/manifest_keys.h"

namespace strata {

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
  return queue_->or_fail(gradients_->note_fetch(unit, stream));
}

Status Engine::release(uint32_t unit, const strata_stream* stream) {
  STRATA_RETURN_IF_ERROR(usable());
  STRATA_RETURN_IF_ERROR(known_unit(unit));
  STRATA_RETURN_IF_ERROR(check_stream(&stream));
  if (!settings_.check_weights) return weights_->release(unit, stream);
  const Status unwritten = undo_write(unit, stream);
  STRATA_RETURN_IF_ERROR(weights_->release(unit, stream));
  return consensus_.all_ok(Among::kGroup, unwritten,
                           "check_weights at the release of unit \"" + layout_.units[unit].name + "\"");
}

Status Engine::undo_write(uint32_t unit, const strata_stream* stream) {
  std::optional<Weights::Written> written;
  STRATA_RETURN_IF_ERROR(queue_->or_fail(weights_->undo_write(unit, stream, &written)));
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
  STRATA_RETURN_IF_ERROR(queue_->or_fail(updater_->join()));
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
  STRATA_RETURN_IF_ERROR(wait());
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
  STRATA_RETURN_IF_ERROR(consensus_.all_ok(Among::kGroup, tensors_->check_write(param, value, root), what));
  STRATA_RETURN_IF_ERROR(queue_->or_fail(weights_->wait_for_readers().during(what)));
  return queue_->or_fail(tensors_->write(param, value, root).during(what));
}

Status Engine::read_param(uint32_t param, const char* array, const strata_tensor& out) {
  STRATA_RETURN_IF_ERROR(usable());
  STRATA_RETURN_IF_ERROR(known_param(param));
  const Progress::Pause pause(progress_.get());
  STRATA_RETURN_IF_ERROR(queue_->or_fail(updater_->join()));
  const std::string name = array ? array : "weight",
                    what = "strata_read_param(\"" + registry_->params[param].name + "\", \"" + name + "\")";
  if (name == "grad" && gradients_->filling()) {
    return {STRATA_FAILED_PRECONDITION, what + ": a micro-batch is open; gradients are reduced when it ends"};
  }
  const int in = gradients_->micro_batches_done();
  if (name == "grad" && gradients_->plan().local && in > 0 && in < gradients_->plan().micro_batches) {
    return {STRATA_FAILED_PRECONDITION,
            what + ": gradients are added up on each rank and reduced after the last of the " +
                std::to_string(gradients_->plan().micro_batches) + " micro-batches, " + std::to_string(in) + " are in"};
  }
  STRATA_RETURN_IF_ERROR(consensus_.all_ok(Among::kGroup, tensors_->check_read(param, name, out), what));
  return queue_->or_fail(tensors_->read(param, name, out).during(what));
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
  STRATA_RETURN_IF_ERROR(
      snapshot_->save(root, tag, run_, settings_.zero_optimization.gather_16bit_weights_on_model_save));
  log(places_.world.rank == 0 ? STRATA_LOG_INFO : STRATA_LOG_DEBUG,
      std::string("checkpoint \"") + root + "/" + tag + "\": written, step " + std::to_string(run_.steps));
  return Ok();
}

Status Engine::load(const char* root, const char* tag) {
  STRATA_RETURN_IF_ERROR(check_path(root, "root"));
  STRATA_RETURN_IF_ERROR(recover());
  const Progress::Pause pause(progress_.get());
  STRATA_RETURN_IF_ERROR(between_steps("strata_load"));
  if (weights_->any_fetched()) return {STRATA_FAILED_PRECONDITION, "strata_load: a unit is still fetched"};
  const Status opened = open_checkpoint();
  if (opened.code() == STRATA_NOT_FOUND) return {STRATA_FAILED_PRECONDITION, opened.text()};  // of the plugin itself
  STRATA_RETURN_IF_ERROR(opened);
  STRATA_RETURN_IF_ERROR(queue_->or_fail(weights_->wait_for_readers()));
  bool changed = false;
  Loaded found;
  const Status loaded = snapshot_->load(root, tag, &found, &changed);
  if (changed) (void)queue_->or_fail(loaded);  // half loaded: only another load, or close
  if (!loaded.ok()) return loaded;
  say_loaded(found);
  run_ = std::move(found.run);
  updater_->unit_steps = run_.unit_steps;
  trace_->begin_step(run_.steps + 1);
  return Ok();
}

void Engine::say_loaded(const Loaded& found) const {
  const bool speaks = places_.data.rank == 0;
  const std::string what = "checkpoint \"" + found.path + "\": ";
  log(speaks ? STRATA_LOG_INFO : STRATA_LOG_DEBUG, what + "loaded, step " + std::to_string(found.run.steps) +
                                                       ", written by " + std::to_string(found.world) +
                                                       (found.world == 1 ? " rank" : " ranks"));
  if (found.unread.empty()) return;
  std::string names;
  for (size_t k = 0; k < std::min<size_t>(found.unread.size(), 5); ++k) {
    names += (k > 0 ? ", \"" : "\"") + found.unread[k] + "\"";
  }
  log(speaks ? STRATA_LOG_WARN : STRATA_LOG_DEBUG, what + std::to_string(found.unread.size()) +
                                                       " of its params are not of this model, and are left unread: " +
                                                       names + (found.unread.size() > 5 ? ", ..." : ""));
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

// What no plan can know: the host's first second gradient of a param brings a sum, which stays.
void Engine::count_sums() {
  if (committed_) plan_.set("sums of several gradients", kDeviceTier, gradients_->fp32_sum_bytes());
}

Status Engine::plan(strata_plan_item* items, uint64_t capacity, uint64_t* count) {
  count_sums();
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
  count_sums();
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
      {"checkpoint", chosen.checkpoint},   {"host_device", chosen.host_device}};
  const auto it = roles.find(role);
  if (it == roles.end()) return {STRATA_INVALID_ARGUMENT, "there is no plugin role \"" + role + "\""};
  return plugins_->find(it->second, id ? id : "", table);
}

// ---- guards ------------------------------------------------------------------------------------------------------

// The host's own error. Before there is a queue, nothing but calls that all ranks make is under way.
Status Engine::fail(const Status& status) {
  if (queue_) {
    (void)queue_->settle();
    queue_->fail(status);
  } else if (usable(false).ok()) {
    note_failure(status);
    (void)or_abort(status);
  }
  return Ok();
}

// The first error is the engine's. Whoever calls this tells the other ranks, too. Any thread.
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
