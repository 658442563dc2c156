// engine_open.cc - how an engine comes up: the manifest, the log, the plugins in the order they need each other.
//
// The collective comes first, because only it knows rank and world; then the device, the tiers, the optimizer. Once the
// ranks have met, none leaves before all know how it went everywhere. The checkpoint plugin waits for the first save or
// load. Nothing large is allocated here.
#include <unistd.h>

#include <algorithm>

#include "core/engine.h"
#include "core/hash.h"
#include "core/manifest/batch.h"
#include "core/manifest/manifest.h"
#include "core/manifest/manifest_rules.h"
#include "core/patience.h"
#include "core/plugins/library_dir.h"
#include "core/plugins/log.h"

namespace strata {

namespace {
constexpr std::chrono::seconds kLate{5};  // ranks of one job begin at about the same time
// A tier gives up sooner than those who wait for it, here and on other ranks: it alone knows which bytes, and where.
constexpr int64_t kTierPart = 2;  // of the deadline
}  // namespace

Status Engine::open(const strata_engine_args& args, std::unique_ptr<Engine>* out) {
  std::unique_ptr<Engine> e(new Engine);
  e->pid_ = getpid();
  if (args.log) {
    e->sink_ = [fn = args.log, ctx = args.log_ctx](strata_log_level level, const std::string& domain,
                                                   const std::string& text) {
      fn(ctx, level, domain.c_str(), text.c_str());
    };
  } else {
    e->sink_ = stderr_sink(e->log_rank_);
  }
  STRATA_RETURN_IF_ERROR(e->read_settings(args));
  const Status opened = e->open_among_ranks(args);
  e->log_plugins();
  STRATA_RETURN_IF_ERROR(opened);
  *out = std::move(e);
  return Ok();
}

Status Engine::read_settings(const strata_engine_args& args) {
  std::vector<std::string> overrides, warnings;
  for (uint64_t i = 0; i < args.override_count; ++i) {
    if (!args.overrides || !args.overrides[i]) {
      return {STRATA_INVALID_ARGUMENT,
              "strata_open: override " + std::to_string(i) + " of " + std::to_string(args.override_count) + " is NULL"};
    }
    overrides.emplace_back(args.overrides[i]);
  }
  if ((args.manifest != nullptr) == (args.manifest_text != nullptr)) {
    return {STRATA_INVALID_ARGUMENT, "strata_open needs either a manifest path or a manifest text"};
  }
  STRATA_RETURN_IF_ERROR(
      args.manifest ? read_manifest(args.manifest, overrides, &settings_, &warnings)
                    : read_manifest_text(args.manifest_text, "manifest text", overrides, &settings_, &warnings));
  deadline_ = std::chrono::nanoseconds(static_cast<int64_t>(settings_.deadline_seconds * 1e9));
  const std::string library_dir = args.plugin_dir ? "" : this_library_dir();
  PluginSearch search = PluginSearch::from_settings(settings_, library_dir);
  if (args.plugin_dir) search.directories.push_back(args.plugin_dir);
  plugins_ = std::make_unique<PluginSet>(std::move(search), settings_.plugin_options);
  preset_options(settings_, plugins_.get());
  host_ = std::make_unique<Host>(sink_, settings_.log_level, 1, plugins_.get());
  for (const std::string& warning : warnings) log(STRATA_LOG_WARN, warning);
  return Ok();
}

template <class Opened, class Api>
Status Engine::open_plugin(const std::string& role, const std::string& name, const char* id, Opened* instance,
                           const Api** table) {
  STRATA_RETURN_IF_ERROR(plugins_->find(name, id, table).during(settings_.named("plugins." + role)));
  STRATA_RETURN_IF_ERROR(plugins_->options(name, &open_args_.options));
  strata_open_args args = open_args_;
  if constexpr (std::is_same_v<Api, strata_offload_api>) args.deadline_ns /= kTierPart;
  STRATA_RETURN_IF_ERROR(instance->open(*table, args).during("plugin " + name));
  if (open_args_.rank >= 0) log_plugins();
  return Ok();
}

// Every rank loads the same plugins: one of them is enough to read.
void Engine::log_plugins() {
  const strata_log_level level = open_args_.rank > 0 ? STRATA_LOG_DEBUG : STRATA_LOG_INFO;
  for (const std::string& line : plugins_->take_log_lines()) log(level, line);
}

// What a rank finds wrong before it has met the others is told to them, too.
Status Engine::open_among_ranks(const strata_engine_args& args) {
  const Status checked = plugins_->check_options(settings_);
  strata_collective_caps ranks;
  const Status met = meet(args, &ranks);
  if (!met.ok()) return checked.ok() ? met : checked;
  const Status opened = checked.ok() ? open_plugins(args, ranks) : checked;
  return ranks.world == 1 ? opened : consensus_.all_ok(Among::kEveryone, opened, "strata_open");
}

Status Engine::meet(const strata_engine_args& args, strata_collective_caps* ranks) {
  open_args_.struct_size = sizeof(open_args_);
  open_args_.host = host_->c();
  open_args_.deadline_ns = deadline_.count();
  open_args_.threads = args.threads;
  open_args_.rank = open_args_.local_rank = args.threads ? args.rank : -1;
  open_args_.world = open_args_.local_world = args.threads ? args.world : -1;
  if (args.job) job_ = args.job;
  open_args_.job = args.job ? job_.c_str() : nullptr;

  const strata_collective_api* collective = nullptr;
  {
    const Patience patience(std::min<std::chrono::nanoseconds>(kLate, deadline_ / 10), [this] {
      log(STRATA_LOG_INFO, "plugins.collective = \"" + settings_.plugins.collective +
                               "\" waits for other ranks, up to " + std::to_string(deadline_.count() / 1'000'000'000) +
                               " s (deadline_seconds): are all of them started, for the same job?");
    });
    STRATA_RETURN_IF_ERROR(
        open_plugin("collective", settings_.plugins.collective, STRATA_COLLECTIVE, &collective_, &collective));
  }
  STRATA_RETURN_IF_ERROR(collective_.caps(ranks));
  open_args_.rank = ranks->rank;
  open_args_.world = ranks->world;
  // By this name the ranks met, so it is the same on all of them: of the host, else of the launcher.
  if (ranks->job && *ranks->job) job_ = ranks->job;
  open_args_.job = job_.empty() ? nullptr : job_.c_str();
  if (ranks->world > 1) *log_rank_ = ranks->rank;
  open_args_.local_rank = ranks->local_rank;
  local_world_ = open_args_.local_world = ranks->local_world;
  std::vector<Greeting> all;
  STRATA_RETURN_IF_ERROR(greet(&all));
  STRATA_RETURN_IF_ERROR(find_place(*ranks));
  choose_cores(all);
  return Ok();
}

Status Engine::open_plugins(const strata_engine_args& args, const strata_collective_caps& ranks) {
  const Status batch = resolve_batch(places_.data.size, &settings_);
  STRATA_RETURN_IF_ERROR(places_.parts() > 1 ? batch.during("where world is the data-parallel size") : batch);
  if (!settings_.trace.path.empty()) {
    STRATA_RETURN_IF_ERROR(find_directory(settings_.trace_parent())
                               .during(settings_.named("trace.path") + ": the directory it is made in is missing"));
  }
  const strata_device_api* device = nullptr;
  STRATA_RETURN_IF_ERROR(open_plugin("device", settings_.plugins.device, STRATA_DEVICE, &device_, &device));
  strata_device_caps caps;
  STRATA_RETURN_IF_ERROR(device_.inspect(&caps));
  STRATA_RETURN_IF_ERROR(check_device(ranks));
  if (places_.data.size == 1) group().use_memory_of(device_);
  STRATA_RETURN_IF_ERROR(take_lender(args.gradient_memory, ranks));
  open_args_.device = device;
  open_args_.device_self = device_.self();

  STRATA_RETURN_IF_ERROR(open_tier(OffloadDevice::kNone, &device_tier_));
  STRATA_RETURN_IF_ERROR(open_tier(settings_.zero_optimization.offload_optimizer.device, &state_tier_));
  if (settings_.zero_optimization.offload_optimizer.split_update && !state_tier_->addressable()) {
    return {STRATA_FAILED_PRECONDITION, "zero_optimization.offload_optimizer.split_update = true: plugin \"" +
                                            settings_.plugins.offload_cpu +
                                            "\" has no addressable memory to stream state from"};
  }
  STRATA_RETURN_IF_ERROR(open_tier(settings_.zero_optimization.offload_param.device, &weight_tier_));
  if (settings_.zero_optimization.keeps_in_memory()) {
    STRATA_RETURN_IF_ERROR(open_tier(OffloadDevice::kCpu, &kept_tier_));
    if (!kept_tier_->addressable()) {
      return {STRATA_FAILED_PRECONDITION, "plugins.offload_cpu = \"" + settings_.plugins.offload_cpu +
                                              "\" has no addressable memory to keep what nvme holds otherwise"};
    }
  }
  const strata_optimizer_api* optimizer = nullptr;
  STRATA_RETURN_IF_ERROR(
      open_plugin("optimizer", settings_.plugins.optimizer, STRATA_OPTIMIZER, &optimizer_, &optimizer));
  if (settings_.zero_optimization.offload_optimizer.uses_device()) {
    STRATA_RETURN_IF_ERROR(open_plugin("device_optimizer", settings_.plugins.device_optimizer, STRATA_OPTIMIZER,
                                       &device_optimizer_, &optimizer));
  }
  STRATA_RETURN_IF_ERROR(open_host_device());
  registry_ = std::make_unique<Registry>(settings_.optimizer);
  // The checkpoint plugin is opened by the first save or load; its section counts as used.
  const strata_options* unused = nullptr;
  (void)plugins_->options(settings_.plugins.checkpoint, &unused);  // absent is fine until it is needed
  return plugins_->check_all_used();
}

// What a rank says to all others before it may be in a group with some.
struct Engine::Greeting {
  uint64_t cpus;  // cpus_fingerprint
  int64_t tensors, stages;
};

namespace {
// Which ranks have the other value is for whoever reads the error: there may be hundreds.
Status same_on_all(const char* key, const std::vector<int64_t>& values) {
  for (size_t r = 1; r < values.size(); ++r) {
    if (values[r] == values[0]) continue;
    const auto others = std::count_if(values.begin(), values.end(), [&](int64_t v) { return v != values[0]; });
    return {STRATA_FAILED_PRECONDITION, std::string(key) + " is " + std::to_string(values[r]) + " on rank " +
                                            std::to_string(r) + " and " + std::to_string(values[0]) + " on rank 0; " +
                                            std::to_string(others) + " of " + std::to_string(values.size()) +
                                            " ranks differ from rank 0, it must be the same on all"};
  }
  return Ok();
}
}  // namespace

// The first thing ranks tell each other: what decides who belongs together, and who shares the CPUs of a machine.
Status Engine::greet(std::vector<Greeting>* all) {
  const Greeting mine = {cpus_fingerprint(allowed_cpus()), settings_.tensor_model_parallel_size,
                         settings_.pipeline_model_parallel_size};
  all->assign(static_cast<size_t>(open_args_.world), mine);
  if (all->size() == 1) return Ok();
  const char* const what = "the place and the CPUs of each rank";
  STRATA_RETURN_IF_ERROR(exchange(Among::kEveryone, what, &mine, all->data(), sizeof(mine)));
  std::vector<int64_t> tensors, stages;
  for (const Greeting& one : *all) {
    tensors.push_back(one.tensors);
    stages.push_back(one.stages);
  }
  STRATA_RETURN_IF_ERROR(same_on_all("tensor_model_parallel_size", tensors));
  return same_on_all("pipeline_model_parallel_size", stages);
}

// Bytes of every rank of the group or the world, to all of them. Once there is a queue it has every collective.
Status Engine::exchange(Among among, const std::string& what, const void* mine, void* all, uint64_t bytes) {
  const uint64_t tag = (4ull << 32) | (fnv1a(what.data(), what.size()) & 0xffffffffu);  // calls differ in it
  if (queue_) {
    CommOp op;
    op.kind = CommOp::Kind::kAgree;
    op.tag = tag;
    op.label = what;
    op.everyone = among == Among::kEveryone;
    op.exchange = {mine, all, bytes};
    return queue_->run(std::move(op));
  }
  strata_coll_args call{};
  call.struct_size = sizeof(call);
  call.label = what.c_str();
  call.tag = tag;
  call.deadline_ns = deadline_.count();
  const strata_status code = collective_.api()->exchange(collective_.self(), mine, all, bytes, &call);
  STRATA_RETURN_IF_ERROR(or_abort(take_failure(code).during(what)));
  add(counters_.agree_bytes, bytes * static_cast<uint64_t>(open_args_.world - 1));
  return Ok();
}

// Where ranks cannot agree on an error, those that wait for this one hear of it at once. Later the queue does this.
Status Engine::or_abort(const Status& status) const {
  const std::string text = "rank " + std::to_string(open_args_.rank) + ": " + status.text();
  if (!status.ok()) collective_.api()->abort(collective_.self(), status.code(), text.c_str());
  return status;
}

// Ranks that may use the same CPUs of a machine divide them.
void Engine::choose_cores(const std::vector<Greeting>& all) {
  const std::vector<int> allowed = allowed_cpus();
  const auto may_use_mine = [mine = cpus_fingerprint(allowed)](const Greeting& one) { return one.cpus == mine; };
  const auto before = std::count_if(all.begin(), all.begin() + open_args_.rank, may_use_mine);
  const auto sharing = std::count_if(all.begin(), all.end(), may_use_mine);
  cores_ = share_of(read_cpus(allowed), static_cast<size_t>(before), static_cast<size_t>(sharing));
  const unsigned threads =
      settings_.threads > 0 ? static_cast<unsigned>(settings_.threads) : cores_.threads(cpu_quota());
  if (settings_.bind_threads && cores_.is_part) bound_to_ = cores_.cpus;
  const std::string where = bound_to_.empty() ? ", not bound to CPUs" : ", bound to CPU " + cpu_list_text(bound_to_);
  const std::string node = cores_.node < 0 ? "" : ", host memory of NUMA node " + std::to_string(cores_.node);
  log(bound_to_.empty() ? STRATA_LOG_DEBUG : STRATA_LOG_INFO, "rank " + std::to_string(open_args_.rank) + ": " +
                                                                  std::to_string(threads) + " worker thread(s)" +
                                                                  where + " of " + cpu_list_text(allowed) + node);
  host_->set_threads(threads, bound_to_);
}

// Which part of the model is here, and who else has it: the ranks this one shards with.
Status Engine::find_place(const strata_collective_caps& ranks) {
  const int64_t tensors = settings_.tensor_model_parallel_size, stages = settings_.pipeline_model_parallel_size;
  STRATA_RETURN_IF_ERROR(Places::find(ranks.rank, ranks.world, tensors, stages, &places_));
  if (places_.parts() == 1 || places_.data.size == 1) return Ok();
  const std::string label = "split into tensor_model_parallel_size " + std::to_string(tensors) +
                            " x pipeline_model_parallel_size " + std::to_string(stages) + " groups";
  strata_coll_args args{};
  args.struct_size = sizeof(args);
  args.tag = (7ull << 32) | static_cast<uint64_t>(tensors) << 16 | static_cast<uint64_t>(stages);
  args.label = label.c_str();
  args.deadline_ns = deadline_.count();
  return or_abort(collective_.split(places_.part(), places_.data.rank, args, &split_)
                      .during("plugins.collective = \"" + settings_.plugins.collective + "\", " + label));
}

// Gradient memory is borrowed only where it can be: on a device with streams, from which the collective reduces.
Status Engine::take_lender(const strata_lender* lender, const strata_collective_caps& ranks) {
  if (!lender || !device_.is_asynchronous()) return Ok();
  if (lender->struct_size < sizeof(*lender) || !lender->lend || !lender->take_back) {
    return {STRATA_INVALID_ARGUMENT, "strata_open: gradient_memory needs its struct_size, lend and take_back"};
  }
  if (places_.data.size == 1 || (ranks.flags & STRATA_COLL_ANY_MEMORY) != 0) {
    lender_ = *lender;
  } else {
    log(STRATA_LOG_INFO, "gradient_memory of the host is not used: collective \"" + settings_.plugins.collective +
                             "\" reduces from memory of its own only");
  }
  return Ok();
}

// Whether device, collective and tiers can work together.
Status Engine::check_device(const strata_collective_caps& ranks) const {
  const PluginChoices& chosen = settings_.plugins;
  const std::string device = "device \"" + chosen.device + "\"";
  if (places_.data.size > 1 && ranks.memory != device_.type()) {
    return {STRATA_FAILED_PRECONDITION, "collective \"" + chosen.collective + "\" does not work on memory of " +
                                            device +
                                            ": choose plugins.device and plugins.collective that fit each other"};
  }
  if (places_.data.size > 1 && (ranks.flags & (STRATA_COLL_ANY_MEMORY | STRATA_COLL_ANY_OUTPUT)) == 0) {
    return {STRATA_UNIMPLEMENTED, "collective \"" + chosen.collective +
                                      "\" writes into its own memory only; this "
                                      "version needs one that writes anywhere"};
  }
  const ZeroSettings& zero = settings_.zero_optimization;
  const auto state = zero.offload_optimizer.device, weights = zero.offload_param.device;
  if (!device_.is_asynchronous()) {
    const bool pins = (state == OffloadDevice::kNvme && zero.offload_optimizer.pin_memory) ||
                      (weights == OffloadDevice::kNvme && zero.offload_param.pin_memory);
    if (pins) log(STRATA_LOG_WARN, "pin_memory has no effect beside nvme: " + device + " has no memory of its own");
    return refuse_part_of_host_device(settings_);
  }
  if (weights == OffloadDevice::kNone || state != OffloadDevice::kNone) return Ok();
  return {STRATA_UNIMPLEMENTED, device +
                                    " with zero_optimization.offload_param but without offload_optimizer: this "
                                    "version updates weights where the optimizer state is; offload both"};
}

// The tier a manifest's `device` word names; each offload plugin is opened once and may serve both.
Status Engine::open_tier(OffloadDevice where, std::unique_ptr<Tier>* out) {
  if (where == OffloadDevice::kNone) {
    *out = std::make_unique<Tier>(device_, counters_);
    return Ok();
  }
  const bool cpu = where == OffloadDevice::kCpu;
  Offload& offload = cpu ? offload_cpu_ : offload_nvme_;
  if (!offload) {
    const strata_offload_api* table = nullptr;
    const std::string& name = cpu ? settings_.plugins.offload_cpu : settings_.plugins.offload_nvme;
    STRATA_RETURN_IF_ERROR(open_plugin(cpu ? "offload_cpu" : "offload_nvme", name, STRATA_OFFLOAD, &offload, &table));
  }
  *out = std::make_unique<Tier>(cpu ? kCpuTier : kNvmeTier, offload, counters_);
  return (*out)->inspect();
}

// Kernels for gradients that are added up in host memory.
Status Engine::open_host_device() {
  const bool leaves = device_.is_asynchronous() && state_tier_->kind() != kDeviceTier;
  if (!leaves || !GradientPlan::of(settings_).adds_up()) return Ok();
  const std::string& name = settings_.plugins.host_device;
  const strata_device_api* table = nullptr;
  STRATA_RETURN_IF_ERROR(open_plugin("host_device", name, STRATA_DEVICE, &host_device_, &table));
  strata_device_caps caps;
  STRATA_RETURN_IF_ERROR(host_device_.inspect(&caps));
  if (!host_device_.is_asynchronous()) return Ok();
  return {STRATA_FAILED_PRECONDITION, "plugins.host_device = \"" + name + "\" works on memory of a device (type " +
                                          std::to_string(host_device_.type()) + "), not of the host"};
}

// The checkpoint plugin brings HDF5 along: it is loaded by the first call that needs it.
Status Engine::open_checkpoint() {
  if (snapshot_) return Ok();
  const strata_checkpoint_api* table = nullptr;
  const Status mine = open_plugin("checkpoint", settings_.plugins.checkpoint, STRATA_CHECKPOINT, &checkpoint_, &table);
  STRATA_RETURN_IF_ERROR(consensus_.all_ok(Among::kEveryone, mine, "opening the checkpoint plugin"));
  snapshot_ = std::make_unique<Snapshot>(*registry_, layout_, checkpoint_, consensus_, *weights_, *states_, *tensors_);
  return Ok();
}

}  // namespace strata
