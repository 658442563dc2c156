#include "core/manifest/manifest_keys.h"

namespace strata {
namespace {

// The address of a field, as a function of the Settings it lies in.
#define FIELD(name) +[](Settings& s) -> decltype(s.name)& { return s.name; }
// The same for a field whose values are words in the manifest and numbers in Settings.
#define CHOICE(name)                                                               \
  ChoiceField {                                                                    \
    +[](Settings& s, int32_t v) { s.name = static_cast<decltype(s.name)>(v); },    \
        +[](const Settings& s) -> int32_t { return static_cast<int32_t>(s.name); } \
  }

constexpr double kMaxCount = 9.2e18;  // just inside 64 bits
constexpr KeyRange kAtLeastZero{0, kMaxCount};
constexpr KeyRange kAtLeastOne{1, kMaxCount};

// The smallest buffers work with any model: what is larger passes in pieces.
const char kLeastForState[] =
    "; buffer_count = 4 and buffer_size = 2048 work with any model: 98304 bytes of host memory for fp32 state, with "
    "weights on a GPU or on disk up to 131072";
const char kLeastForParams[] =
    "; buffer_count = 1 and buffer_size = 2048 work with any model: 4096 bytes of host memory, 8192 for fp32 params";

// Rows are {path, field, default, doc[, optional, range, choices, DeepSpeed's spelling]}; what is left out is empty.
// clang-format off
std::vector<ManifestKey> batch_and_run_keys() {
  return {
      {"train_batch_size", FIELD(train_batch_size), "8",
       "Samples per optimizer step over all data-parallel ranks; any two of the three batch keys give the third.",
       true, kAtLeastOne},
      {"train_micro_batch_size_per_gpu", FIELD(train_micro_batch_size_per_gpu), "4",
       "Samples per rank in one forward and backward.", true, kAtLeastOne},
      {"gradient_accumulation_steps", FIELD(gradient_accumulation_steps), "1",
       "Micro-batches whose gradients are added before an optimizer step.", true, {1, 1e9}},
      {"tensor_model_parallel_size", FIELD(tensor_model_parallel_size), "1",
       "Ranks the host splits each layer over. ZeRO shards over the rest of the world, the data-parallel ranks.",
       false, {1, 65535}},
      {"pipeline_model_parallel_size", FIELD(pipeline_model_parallel_size), "1",
       "Pipeline stages the host splits the layers into; each shards its own over its data-parallel ranks.",
       false, {1, 65535}},
      {"steps_per_print", FIELD(steps_per_print), "10",
       "Optimizer steps between two lines of rank 0 with loss, norm, speed, memory and bytes, and of "
       "wall_clock_breakdown; 0: none.", false, kAtLeastZero},
      {"gradient_clipping", FIELD(gradient_clipping), "0.0",
       "Largest global gradient norm; larger gradients are scaled down to it; 0: no clipping.", false, {0, 1e30}},
      {"communication_data_type", CHOICE(communication_data_type), "\"\"",
       "Type gradients are sent as; \"\": the type of the param.",
       false, {}, {{"", 0}, {"fp32", STRATA_F32}, {"bf16", STRATA_BF16}, {"fp16", STRATA_F16}}},
      {"wall_clock_breakdown", FIELD(wall_clock_breakdown), "false",
       "Log where the time of a step goes, every steps_per_print steps: milliseconds per part; parts overlap."},
      {"check_weights", FIELD(check_weights), "false",
       "Refuse, on all ranks, a write into fetched weights; for finding bugs: copies in host memory, slower, and every "
       "release is collective."},
      {"deadline_seconds", FIELD(deadline_seconds), "600.0",
       "Longest wait, in seconds, for other ranks or for I/O before an error names who is missing.",
       false, {1e-3, 1e9}},
      {"host_memory_limit", FIELD(host_memory_limit), "0",
       "Bytes of host memory the ranks of this machine may use together; 0: the cgroup's limit, else all memory.",
       false, kAtLeastZero},
      {"threads", FIELD(threads), "0",
       "Worker threads per rank; 0: the CPUs it may use, divided by the ranks of this machine.", false, {0, 4096}},
      {"bind_threads", FIELD(bind_threads), "true",
       "Bind the engine's threads to CPUs of their own where ranks share a machine; docs/threads.md."},
      {"log_level", CHOICE(log_level), "\"info\"",
       "Lines below this level are not logged.", false, {},
       {{"debug", STRATA_LOG_DEBUG}, {"info", STRATA_LOG_INFO},
        {"warn", STRATA_LOG_WARN}, {"error", STRATA_LOG_ERROR}}},
      {"no_effect_keys", CHOICE(no_effect_is_error), "\"error\"",
       "What a key does that is given but changes nothing under the other settings: stop, or be warned about.",
       false, {}, {{"error", 1}, {"warn", 0}}},
  };
}

std::vector<ManifestKey> trace_keys() {
  return {
      {"trace.path", FIELD(trace.path), "\"trace\"",
       "Directory for rankN.json, made if its parent is there, relative to this file. Not given: no trace.", true},
      {"trace.first_step", FIELD(trace.first_step), "1",
       "First step that is recorded, or the first one a loaded run makes after it.", false, kAtLeastOne},
      {"trace.steps", FIELD(trace.steps), "0",
       "How many are; then the file is written. 0: all up to the close, which writes the newest.", false, kAtLeastZero},
      {"trace.records", FIELD(trace.records), "16384",
       "Newest spans kept of each thread and each device stream; 96 bytes each.", false, {16, 1e7}},
  };
}

std::vector<ManifestKey> plugin_keys() {
  return {
      {"plugins.device", FIELD(plugins.device), "\"device_host\"", "Where weights are used."},
      {"plugins.host_device", FIELD(plugins.host_device), "\"device_host\"",
       "Adds up gradients of several micro-batches in host memory, where a device's optimizer state is offloaded."},
      {"plugins.collective", FIELD(plugins.collective), "\"comm_local\"", "How ranks exchange memory."},
      {"plugins.offload_cpu", FIELD(plugins.offload_cpu), "\"offload_cpu\"",
       "The tier behind device = \"cpu\"."},
      {"plugins.offload_nvme", FIELD(plugins.offload_nvme), "\"offload_nvme\"",
       "The tier behind device = \"nvme\"."},
      {"plugins.optimizer", FIELD(plugins.optimizer), "\"optim_adamw\"", "The update."},
      {"plugins.device_optimizer", FIELD(plugins.device_optimizer), "\"optim_adamw_cuda\"",
       "The same update on the device, where split_update, device_state_budget or ratio lets it have a part."},
      {"plugins.checkpoint", FIELD(plugins.checkpoint), "\"checkpoint\"",
       "How checkpoints are written and read."},
      {"plugins.path", FIELD(plugins.path), "[]",
       "Directories searched for plugins first, relative to this file."},
  };
}

std::vector<ManifestKey> precision_and_optimizer_keys() {
  return {
      {"bf16.enabled", FIELD(bf16_enabled), "false",
       "A hint to host programs: register params as bf16, not fp32. The core takes each dtype as registered."},
      {"fp16.enabled", FIELD(fp16_enabled), "false",
       "Must be false: training with loss scaling is not there yet."},
      {"optimizer.type", FIELD(optimizer.type), "\"AdamW\"",
       "AdamW decays weights apart from the gradient, Adam adds the decay to it.",
       false, {}, {{"AdamW", 0}, {"Adam", 0}}},
      {"optimizer.params.lr", FIELD(optimizer.lr), "1e-3",
       "Learning rate until the host gives another.", false, {0, 1e9}},
      {"optimizer.params.betas", FIELD(optimizer.betas), "[0.9, 0.999]",
       "Decay rates of the two moments.", false, {0, 1, true}},
      {"optimizer.params.eps", FIELD(optimizer.eps), "1e-8",
       "Added to the root of the second moment.", false, {0, 1}},
      {"optimizer.params.weight_decay", FIELD(optimizer.weight_decay), "0.0",
       "Weight decay factor.", false, {0, 1e9}},
      {"optimizer.params.adam_w_mode", FIELD(optimizer.adam_w_mode), "true",
       "Decoupled weight decay; false with type = \"Adam\" unless given."},
      {"optimizer.params.state_layout", FIELD(optimizer.state_layout), "\"whole\"",
       "whole: fp32 master weights, 12 bytes of state per param; split: only their low 16 bits beside the bf16 weight, "
       "10 bytes.", false, {}, {{"whole", 0}, {"split", 0}}},
  };
}

std::vector<ManifestKey> zero_keys() {
  const std::string z = "zero_optimization.", ds = z + "stage3_";
  return {
      {z + "stage", FIELD(zero_optimization.stage), "0",
       "What is sharded: 0 nothing, 1 optimizer state, 2 also gradients, 3 also params.", false, {0, 3}},
      {z + "overlap_comm", FIELD(zero_optimization.overlap_comm), "true",
       "Reduce gradients while backward goes on."},
      {z + "contiguous_gradients", FIELD(zero_optimization.contiguous_gradients), "true",
       "Copy gradients into one buffer as they come; false: they wait in the host's tensors until reduced."},
      {z + "reduce_bucket_size", FIELD(zero_optimization.reduce_bucket_size), "5e8",
       "Elements of gradient that are reduced in one call at most, unless one unit has more.", false, kAtLeastOne},
      {z + "prefetch_bucket_size", FIELD(zero_optimization.prefetch_bucket_size), "5e7",
       "Elements gathered ahead of their use; 0: no prefetch. Stage 3.",
       false, kAtLeastZero, {}, ds + "prefetch_bucket_size"},
      {z + "param_persistence_threshold", FIELD(zero_optimization.param_persistence_threshold), "1e5",
       "Params with at most this many elements are kept whole on every rank. Stage 3.",
       false, kAtLeastZero, {}, ds + "param_persistence_threshold"},
      {z + "model_persistence_threshold", FIELD(zero_optimization.model_persistence_threshold), "9.2e18",
       "Elements of all those params together: in the order of registration, one that goes beyond is sharded. Stage 3.",
       false, kAtLeastZero, {}, ds + "model_persistence_threshold"},
      {z + "max_live_parameters", FIELD(zero_optimization.max_live_parameters), "1e9",
       "Elements that may be gathered at one time. Stage 3.", false, kAtLeastZero, {}, ds + "max_live_parameters"},
      {z + "max_reuse_distance", FIELD(zero_optimization.max_reuse_distance), "1e9",
       "A released unit stays gathered when it is used again within this many elements. Stage 3.",
       false, kAtLeastZero, {}, ds + "max_reuse_distance"},
      {z + "sub_group_size", FIELD(zero_optimization.sub_group_size), "1e9",
       "Elements the optimizer updates at a time.", false, kAtLeastOne},
      {z + "accumulate_locally", FIELD(zero_optimization.accumulate_locally), "false",
       "Keep full fp32 gradients (4 bytes per param on every rank) and reduce once per step, not per micro-batch. "
       "Stages 2 and 3."},
      {z + "gather_16bit_weights_on_model_save", FIELD(zero_optimization.gather_16bit_weights_on_model_save), "false",
       "Every checkpoint has the one-file weights in it, <root>/<tag>/weights.h5; no rank gathers them.",
       false, {}, {}, ds + "gather_16bit_weights_on_model_save"},
  };
}

std::vector<ManifestKey> offload_keys() {
  const std::string o = "zero_optimization.offload_optimizer.", p = "zero_optimization.offload_param.";
  const std::vector<KeyChoice> devices = {{"none", static_cast<int32_t>(OffloadDevice::kNone)},
                                          {"cpu", static_cast<int32_t>(OffloadDevice::kCpu)},
                                          {"nvme", static_cast<int32_t>(OffloadDevice::kNvme)}};
  return {
      {o + "device", CHOICE(zero_optimization.offload_optimizer.device), "\"none\"",
       "Tier of the optimizer state; none: the device.", false, {}, devices},
      {o + "pin_memory", FIELD(zero_optimization.offload_optimizer.pin_memory), "false",
       "Page-lock the host memory that a device copies from or to: gradients, and with split_update the state, or "
       "split_share of it. What passes between a disk and a GPU is so in any case."},
      {o + "ratio", FIELD(zero_optimization.offload_optimizer.ratio), "1.0",
       "Share of the state that is offloaded at the least; whole units of the rest are kept and updated on the device. "
       "0: all of it, as beside params in host memory.", false, {0, 1}},
      {o + "device_state_budget", FIELD(zero_optimization.offload_optimizer.device_state_budget), "0",
       "Bytes of device memory for optimizer state: units that fit are kept and updated there, the rest is offloaded. "
       "What is left over keeps fp32 sums of gradients of further units, where there are several micro-batches.",
       false, kAtLeastZero},
      {o + "split_update", FIELD(zero_optimization.offload_optimizer.split_update), "false",
       "The device updates a share of the offloaded state, which is copied to it and back. Pin the memory."},
      {o + "split_share", FIELD(zero_optimization.offload_optimizer.split_share), "0.4",
       "That share. Not given: it follows the rates of both sides, so that they end together.", true, {0, 1}},
      {o + "nvme_path", FIELD(zero_optimization.offload_optimizer.nvme_path), "\"/local/nvme\"",
       "Directory of the state files, relative to this file; of several disks \"/a, /b\". Only nvme, and needed there.",
       true},
      {o + "buffer_count", FIELD(zero_optimization.offload_optimizer.buffer_count), "4",
       "Buffers between disk and memory: parts of the state being read, updated and written at once. Only nvme.", false,
       {4, 1024, false, kLeastForState}},
      {o + "buffer_size", FIELD(zero_optimization.offload_optimizer.buffer_size), "4194304",
       "Elements whose state a buffer holds (12 bytes each if it is fp32), in steps of 2048; larger sub-groups are "
       "cut. Not given: 4194304, or sub_group_size if that is less. Only nvme.",
       true, {2048, kMaxCount, false, kLeastForState}},
      {o + "cpu_state_budget", FIELD(zero_optimization.offload_optimizer.cpu_state_budget), "0",
       "Bytes of host memory for state that is kept out of the disk: the same share of every unit. Only nvme.", false,
       kAtLeastZero},
      {o + "fast_init", FIELD(zero_optimization.offload_optimizer.fast_init), "false",
       "Leave out writing zeros at the start. Only nvme."},
      {o + "pipeline_read", FIELD(zero_optimization.offload_optimizer.pipeline_read), "true",
       "Read later parts of the state while one is updated. Only nvme."},
      {o + "pipeline_write", FIELD(zero_optimization.offload_optimizer.pipeline_write), "true",
       "Update later parts of the state while one is written. Only nvme."},
      {p + "device", CHOICE(zero_optimization.offload_param.device), "\"none\"",
       "Tier of the params' shards; none: the device. Stage 3.", false, {}, devices},
      {p + "pin_memory", FIELD(zero_optimization.offload_param.pin_memory), "false",
       "Page-lock the host memory it uses."},
      {p + "nvme_path", FIELD(zero_optimization.offload_param.nvme_path), "\"/local/nvme\"",
       "Directory of the params' files; where the state is on nvme, too, the same. Only nvme, and needed there.", true},
      {p + "buffer_count", FIELD(zero_optimization.offload_param.buffer_count), "5",
       "Buffers that params pass through from the disk, read ahead in the recorded order. Only nvme.", false,
       {1, 1024, false, kLeastForParams}},
      {p + "buffer_size", FIELD(zero_optimization.offload_param.buffer_size), "8388608",
       "Elements of such a buffer, in steps of 2048; larger shards pass in pieces. Not given: 8388608, or the largest "
       "shard if that is less. Only nvme.", true, {2048, kMaxCount, false, kLeastForParams}},
      {p + "max_in_cpu", FIELD(zero_optimization.offload_param.max_in_cpu), "1e9",
       "Elements of params that this rank keeps in host memory and not on disk: whole units, spread over the order. "
       "Only nvme.", false, kAtLeastZero},
  };
}
#undef FIELD
// clang-format on

}  // namespace

const std::vector<ManifestSection>& manifest_sections() {
  static const std::vector<ManifestSection> sections = {
      {"", "Batch and run"},
      {"trace", "When each thread and device stream does what, for ui.perfetto.dev"},
      {"plugins", "Which plugin serves which role: an id, or the path of a plugin's TOML relative to this file"},
      {"bf16", "Weights in bfloat16"},
      {"fp16", "Training in float16 with loss scaling"},
      {"optimizer", "The optimizer"},
      {"optimizer.params", "Its settings, the default of every param group"},
      {"zero_optimization", "What is sharded, and how it moves; sizes are in elements"},
      {"zero_optimization.offload_optimizer", "Where the optimizer state lives"},
      {"zero_optimization.offload_param", "Where the sharded params live"},
  };
  return sections;
}

const std::vector<ManifestKey>& manifest_keys() {
  static const std::vector<ManifestKey> keys = [] {
    std::vector<ManifestKey> all;
    for (auto part : {batch_and_run_keys(), trace_keys(), plugin_keys(), precision_and_optimizer_keys(), zero_keys(),
                      offload_keys()})
      all.insert(all.end(), part.begin(), part.end());
    return all;
  }();
  return keys;
}

const std::vector<DeprecatedKey>& deprecated_keys() {
  static const std::vector<DeprecatedKey> keys = {
      {"zero_optimization.cpu_offload", "zero_optimization.offload_optimizer.device"},
      {"zero_optimization.cpu_offload_params", "zero_optimization.offload_param.device"},
  };
  return keys;
}

const std::vector<RefusedKey>& refused_keys() {
  static const std::string scaling = "belongs to training with loss scaling, which is not there yet; use bf16";
  static const std::vector<RefusedKey> keys = {
      {"fp16.loss_scale", scaling},
      {"fp16.loss_scale_window", scaling},
      {"fp16.initial_scale_power", scaling},
      {"fp16.hysteresis", scaling},
      {"fp16.consecutive_hysteresis", scaling},
      {"fp16.min_loss_scale", scaling},
      {"fp16.auto_cast", "is not there: the host chooses the type of each param"},
      {"zero_optimization.cpu_offload_use_pin_memory",
       "was replaced by zero_optimization.offload_optimizer.pin_memory"},
      {"zero_optimization.reduce_scatter", "is not a choice here: stages 1 to 3 always reduce to the owner"},
      {"zero_optimization.allgather_bucket_size", "is not there: a unit is gathered in one call"},
      {"zero_optimization.allgather_partitions", "is not a choice here"},
      {"scheduler", "is not there: the host gives the learning rate of each step"},
  };
  return keys;
}

const ManifestKey* find_manifest_key(std::string_view path) {
  for (const ManifestKey& key : manifest_keys())
    if (key.path == path || (!key.deepspeed.empty() && key.deepspeed == path)) return &key;
  return nullptr;
}

bool is_manifest_section(std::string_view path) {
  for (const ManifestSection& section : manifest_sections())
    if (section.path == path) return true;
  return path == "plugin";
}

}  // namespace strata
