"""Every key that DeepSpeed 0.19.8 knows, some that older ones did, and Strata's own, with what becomes of each here.

A rule is a function of a key's value: (status, keys of the manifest, value there, note). Keys "" are the path itself,
None: nothing is set. A status of None refuses the key, for the reason in the note. A rule's `auto` is the value that
"auto" stands for where nobody gives one; most have none. rule_of() finds a path's.
"""
import difflib
import math

from ..errors import did_you_mean

HONOURED, MAPPED, NO_EFFECT = "honoured", "mapped", "without effect"


def same(value):
    return HONOURED, "", value, ""


def to(key, note="", convert=lambda value: value):
    return lambda value: (MAPPED if note else HONOURED, key, convert(value), note)


def _alias(key, rule):
    """The rule of another name of `key`."""
    def other(value):
        status, target, setting, note = rule(value)
        return status, key if target == "" else target, setting, note
    return other


def idle(note):
    return _with_auto(lambda value: (NO_EFFECT, None, None, note), None)


def only(harmless, note, reason):
    """Without effect at the values that are what happens here, refused otherwise. The first is DeepSpeed's default."""
    harmless = harmless if isinstance(harmless, tuple) else (harmless,)
    return _with_auto(lambda value: (NO_EFFECT, None, None, note) if _text(value) in harmless
                      else (None, None, None, reason), harmless[0])


def refused(reason):
    return _with_auto(lambda value: (None, None, None, reason), "auto")


def off(reason):
    return only(False, "off", reason)


def whole(key, note, low, high, multiple=1):
    """A whole number of these bounds, for another key here."""
    needed = f"a whole number from {low} to {high}" + (f", a multiple of {multiple}" if multiple > 1 else "")

    def rule(value):
        right = _is_number(value) and low <= value <= high and value % multiple == 0
        return (MAPPED, key, int(value), note) if right else (None, None, None, f"{needed} is needed")
    return rule


def _with_auto(rule, value):
    rule.auto = value
    return rule


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _text(value):
    """Words are compared as DeepSpeed does, which knows them in any case."""
    return value.lower() if isinstance(value, str) else value


# ---- rules of single keys --------------------------------------------------------------------------------------------

ZERO = "zero_optimization."
OPTIMIZER, PARAM = ZERO + "offload_optimizer.", ZERO + "offload_param."
PINNED = (OPTIMIZER + "pin_memory", PARAM + "pin_memory")
NO_FP16 = ("training in fp16 with loss scaling is not there: set fp16.enabled to false and bf16.enabled to true (with "
           "a Trainer, both to \"auto\", and pass bf16=True)")
_FP32_STATE = "master weights are fp32; a manifest's optimizer.params.state_layout = \"split\" saves 2 bytes a param"
_LEVELS = {"debug": "debug", "info": "info", "warning": "warn", "error": "error", "critical": "error"}
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam"}
_MOST = int(9.2e18)  # the manifest's largest count; DeepSpeed's "no limit" is a little more


def optimizer_type(value):
    """The manifest's word for DeepSpeed's, which knows it in any case; others as they are."""
    return _OPTIMIZERS.get(_text(value), value)


def _optimizer(value):
    if optimizer_type(value) not in _OPTIMIZERS.values():
        return None, None, None, 'the optimizers are "AdamW" and "Adam"'
    return HONOURED, "", optimizer_type(value), ""


def _cadence(value):
    return (MAPPED, "", 0, "never, 0 here") if value == math.inf else same(value)


def _unless_0(note):
    """DeepSpeed's 0 has no like here: the default stands for it, which changes no result."""
    return lambda value: (MAPPED, None, None, note) if value == 0 and _is_number(value) else same(value)


def _log_level(value):
    if _text(value) not in _LEVELS:
        return None, None, None, "the levels are " + ", ".join(_LEVELS)
    return MAPPED, "", _LEVELS[_text(value)], f"log_level = {_LEVELS[_text(value)]}"


def _not_fp16(value):
    return (NO_EFFECT, None, None, "off") if value is False else (None, None, None, NO_FP16)


_SCHEDULER = ("use a scheduler of torch: initialize(lr_scheduler=function of the optimizer); with a Trainer its "
              "lr_scheduler_type, constant_with_warmup for WarmupLR, linear for WarmupDecayLR")
_DIVIDED = "sums are divided once, in the update"
_PARALLEL = "the layers of a model in parts are the program's: tensor_model_parallel_size says how many parts"
_QUANTIZED = "quantized communication is not there yet"
_MONITOR = "no monitor is there: log engine.get_lr(), get_global_grad_norm() and the loss, or a Trainer's report_to"
_PROFILER = ("no profiler is there: a manifest's [trace] records the time of each part, wall_clock_breakdown logs it, "
             "torch.profiler counts flops")
_COMMS = "calls are not logged one by one: engine.strata.core.counters() has the bytes of each kind"
_COMPILE = "compile the blocks with torch.compile before initialize"
_OTHER_OPTIMIZER = "it is of an optimizer that is not there"

_RULES = {
    "train_batch_size": same, "train_micro_batch_size_per_gpu": same, "gradient_accumulation_steps": same,
    "tensor_model_parallel_size": same, "pipeline_model_parallel_size": same,
    "managed_gradient_accumulation": only(True, "always", "gradient_accumulation_steps says when an update comes"),
    "steps_per_print": _cadence, "gradient_clipping": same, "wall_clock_breakdown": same, "log_level": _log_level,
    "communication_data_type": to("", convert=_text),
    "seq_parallel_communication_data_type": idle("there is no sequence parallelism"),
    "sequence_parallel_size": only(1, "1", "sequence parallelism is not there"),
    "use_data_before_expert_parallelism": idle("there is no expert parallelism"),
    "prescale_gradients": only(False, "off", _DIVIDED), "gradient_predivide_factor": only(1.0, "1", _DIVIDED),
    "gradient_allreduce_op": only("mean", "gradients are averaged over the ranks",
                                  "gradients are averaged over the ranks; scale the loss for a sum"),
    "disable_allgather": off("leaving out all-gathers is not there"),
    "sparse_gradients": off("sparse gradients are not there"), "graph_harvesting": off("DeepSpeed has removed it"),
    "dataloader_drop_last": idle("no data loader is made"), "dump_state": idle("settings are always logged"),
    "memory_breakdown": idle("the plan, and the lines of steps_per_print, always say where memory goes"),
    "disable_python_gc": idle("gc.disable() is the program's to call"),
    "vocabulary_size": idle("DeepSpeed only warns by it"),
    "keep_in_fp32_modules": only("auto", "buffers keep their dtype", "params have the dtype they are built with"),
    "zero_allow_untested_optimizer": idle("the optimizer is a plugin"),
    "zero_force_ds_cpu_optimizer": idle("the optimizer is a plugin"),
    "allgather_size": idle("there is nothing to choose here"),
    "datastates_ckpt": only(False, "off", "checkpoints have a writer of their own"),
    "optimizer.type": _optimizer, "optimizer.legacy_fusion": idle("there is one implementation"),
    "optimizer.params.bias_correction": only(True, "always on", "bias correction cannot be switched off"),
    "optimizer.params.amsgrad": off("AMSGrad is not there"), "optimizer.params.maximize": off("losses are minimized"),
    "optimizer.params.fp32_optimizer_states": only((True, None), "always", "the moments are fp32"),
    "optimizer.params.max_grad_norm": refused("gradient_clipping is the key, in DeepSpeed as well"),
    "fp16.enabled": _not_fp16, "fp16.fp16_master_weights_and_grads": off(_FP32_STATE),
    "torch_autocast.enabled": off("weights kept in fp32 under torch.autocast would be copied whole on every rank; "
                                  "bf16.enabled gives them the dtype of the computation"),
    "data_types.grad_accum_dtype": only((None, "fp32", "float32", "float", "torch.float32"), "fp32 is what they are "
                                        "added up in", "gradients of several micro-batches are added up in fp32"),
    "data_types.param_dtype": only(None, "bf16.enabled says it", "bf16.enabled says it; leave it out"),
    "data_types.buffer_dtype": only(None, "buffers keep their dtype", "buffers keep their dtype; cast them before"),
    "data_types.keep_in_fp32_modules": only(("auto", []), "buffers keep their dtype",
                                            "params and buffers have the dtype they are built with"),
    "checkpoint.tag_validation": only(("warn", "ignore", "fail"), "ranks that differ are always an error",
                                      "the words are Warn, Ignore and Fail"),
    "checkpoint.load_universal": off("every checkpoint of Strata loads at any world size and stage, none of "
                                     "DeepSpeed's does: leave it out"),
    "checkpoint.use_node_local_storage": off("a checkpoint is one folder that all ranks write to"),
    "checkpoint.writer.type": only(("fast", "python", None), "checkpoints have a writer of their own",
                                   "a writer that writes nothing is not there"),
    "tensor_parallel.autotp_size": only((0, 1), "one part", _PARALLEL),
    "expert_parallel.enabled": off("expert parallelism is not there"),
    "pipeline.stages": only(("auto", 1), "no PipelineModule is there", "the schedule of a model in parts is the "
                            "program's: pipeline_model_parallel_size says how many parts"),
    "hybrid_engine.enabled": off("generation is engine.eval() and torch.no_grad()"),
    "compile.deepcompile": off(_COMPILE), "compile.enabled": off(_COMPILE),
    "autotuning.enabled": off("no tuner runs inside initialize"),
    "flops_profiler.enabled": off(_PROFILER), "comms_logger.enabled": off(_COMMS),
    "timers.throughput.enabled": idle("the lines of steps_per_print always have it"),
    "timers.throughput.synchronized": idle("times are taken without waiting for the device"),
    "weight_quantization.enabled": off("quantized weights are not there"),
    ZERO + "reduce_scatter": only(True, "always", "gradients are reduced by reduce-scatter only"),
    ZERO + "ignore_unused_parameters": only(True, "always", "unused params are no error"),
    ZERO + "round_robin_gradients": idle("every rank has an equal share"),
    ZERO + "load_from_fp32_weights": idle("checkpoints have the fp32 master"),
    ZERO + "elastic_checkpoint": idle("checkpoints load at any world size"),
    ZERO + "compute_grad_norm": idle("the norm is always computed"),
    ZERO + "save_muon_momentum_buffer_in_memory": idle("Muon is not there"),
    ZERO + "zero_hpz_partition_size": only((1, 0), "1", "secondary partitions are not there yet"),
    ZERO + "mics_shard_size": only(-1, "off", "DeepSpeed has removed it"),
    ZERO + "mics_hierarchical_params_gather": off("DeepSpeed has removed it"),
    ZERO + "zenflow": refused("ZenFlow changes the update; it is not there"),
    ZERO + "sub_group_size": _unless_0("the default, 1e9: 0 is one param at a time, and sizes change no result here"),
    ZERO + "max_live_parameters": _unless_0("the default, 1e9: what is at work is gathered, for 0 as well; "
                                            "max_reuse_distance and prefetch_bucket_size say what is beside it"),
    ZERO + "model_persistence_threshold": to("", convert=lambda n: min(n, _MOST) if _is_number(n) else n),
    ZERO + "cpu_offload": to(OPTIMIZER + "device", OPTIMIZER + "device", lambda value: "cpu" if value else "none"),
    ZERO + "cpu_offload_param": to(PARAM + "device", PARAM + "device", lambda value: "cpu" if value else "none"),
    ZERO + "cpu_offload_use_pin_memory": to(PINNED, "pin_memory of what is offloaded"),
    ZERO + "stage3_gather_fp16_weights_on_model_save": to(ZERO + "gather_16bit_weights_on_model_save",
                                                          "its older name"),
    OPTIMIZER + "super_offload": off("it is not there; offload_optimizer.split_update of a manifest is its like"),
    OPTIMIZER + "cpuadam_cores_perc": idle("the manifest's `threads` says how many"),
    **{ZERO + name: same for name in ("stage", "overlap_comm", "contiguous_gradients", "reduce_bucket_size")},
    **{OPTIMIZER + name: same for name in ("device", "pin_memory", "ratio", "nvme_path", "buffer_count", "fast_init",
                                           "pipeline_read", "pipeline_write")},
    **{PARAM + name: same for name in ("device", "pin_memory", "nvme_path", "buffer_count", "buffer_size",
                                       "max_in_cpu")},
}
for _name in ("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
              "max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"):
    _rule = _RULES.setdefault(ZERO + _name, same)
    _RULES[f"{ZERO}stage3_{_name}"] = _alias(ZERO + _name, _rule)
for _name in ("bf16", "bfloat16"):
    _RULES |= {
        _name + ".check_grad_overflow": only(True, "gradients are always checked", "gradients are always checked"),
        _name + ".immediate_grad_update": idle("gradients are folded as they come"),
        _name + ".bf16_master_weights_and_grads": off(_FP32_STATE), _name + ".bf16_optimizer_states": off(_FP32_STATE)}
_RULES |= {"bf16.enabled": same, "bfloat16.enabled": to("bf16.enabled", "an alias of bf16.enabled")}


def _several(prefix, rule, names):
    _RULES.update({prefix + name: rule for name in names.split()})


_several("optimizer.params.", same, "lr betas eps weight_decay adam_w_mode")
_several("optimizer.params.", idle("there is one implementation"),
         "torch_adam fused foreach capturable differentiable set_grad_none")
_several("optimizer.params.", refused(_OTHER_OPTIMIZER),
         "momentum nesterov dampening muon_lr adam_lr ns_method max_coeff min_coeff freeze_step cuda_aware "
         "comm_backend_name")
_several(ZERO, idle("there is nothing to choose here"),
         "allgather_partitions allgather_bucket_size use_multi_rank_bucket_allreduce legacy_stage1 "
         "memory_efficient_linear log_trace_cache_warnings override_module_apply parameter_alignment "
         "enable_sanity_checks pipeline_loading_checkpoint module_granularity_threshold "
         "use_all_reduce_for_fetch_params allgather_sequential stage3_module_granularity_threshold "
         "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential")
_several(ZERO, off(_QUANTIZED),
         "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients")
_several(ZERO + "leaf_module.", only([], "none", "pass units=[...] with the class of the layer"),
         "classes names name_suffixes")
_several(ZERO + "zenflow.", _RULES[ZERO + "zenflow"],
         "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
         "full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch")
_several("fp16.", idle("fp16.enabled is false"),
         "auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale")
_several("torch_autocast.", idle("torch_autocast.enabled is false"), "dtype lower_precision_safe_modules")
_several("activation_checkpointing.", off("moving activations is not there yet"),
         "partition_activations cpu_checkpointing")
_several("activation_checkpointing.", idle("checkpointing is the model's"),
         "contiguous_memory_optimization number_checkpoints synchronize_checkpoint_boundary profile")
_several("checkpoint.", idle("checkpoints have a writer of their own"),
         "checkpoint_serialization parallel_write.pipeline_stage writer.decoupled writer.io_buffer_size "
         "writer.io_buffer_double writer.show_statistics writer.data_parallel writer.io_multiplier")
_several("tensor_parallel.", only((1, 0), "one part", _PARALLEL), "tp.tp_size tensor_parallel.tp_size")
_several("tensor_parallel.", idle("tensor_parallel.autotp_size says one part"),
         "dtype tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend tp.tp_grain_size tp.mpu tp.tp_group "
         "tensor_parallel.tp_grain_size tensor_parallel.mpu tensor_parallel.tp_group injection_policy_tuple "
         "partition_config preset_model keep_module_on_host replace_with_kernel_inject kernel_inject")
_several("expert_parallel.", idle("expert_parallel.enabled is false"),
         "autoep_size expert_tensor_parallel_size validate_folding_routing async_split_plan preset_model "
         "moe_layer_pattern expert_pattern router_pattern use_grouped_mm disable_triton_grouped_mm route_norm "
         "route_scale score_apply combine_impl row_weighting_impl gate_up_impl comm_backend comm_num_sm "
         "comm_qp_margin comm_max_tokens_per_rank num_expert_groups num_limited_groups score_func top_k "
         "load_balance_coeff routed_scaling_factor expert_w1 expert_w2 expert_w3 num_experts_attr top_k_attr "
         "has_shared_experts shared_experts_pattern shared_experts_gate_pattern expert_activation")
_several("pipeline.", idle("no PipelineModule is there"),
         "partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned use_reentrant")
_several("hybrid_engine.", idle("hybrid_engine.enabled is false"),
         "max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
         "enable_cuda_graph")
_several("compile.", idle("compile.deepcompile is false"),
         "autoep_non_moe free_activation free_activation_threshold offload_activation offload_activation_pin_memory "
         "offload_opt_states double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce "
         "sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors "
         "passes")
_several("compile.", idle(_COMPILE), "disable backend kwargs")  # of older ones
_several("autotuning.", idle("autotuning.enabled is false"),
         "fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path tuner_type "
         "tuner_early_stopping tuner_num_trials arg_mappings max_train_batch_size min_train_batch_size "
         "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes mp_size "
         "model_info_path model_info.profile model_info.num_params model_info.hidden_size model_info.num_layers")
_several("flops_profiler.", idle("flops_profiler.enabled is false"),
         "recompute_fwd_factor profile_step module_depth top_modules detailed output_file")
_several("comms_logger.", idle("comms_logger.enabled is false"), "prof_all prof_ops verbose debug")
for _name, _names in (("tensorboard", "output_path job_name"), ("csv_monitor", "output_path job_name"),
                      ("wandb", "group team project"),
                      ("comet", "samples_log_interval project workspace api_key experiment_name experiment_key online "
                                "mode")):
    _several(_name + ".", off(_MONITOR), "enabled")
    _several(_name + ".", idle(_name + ".enabled is false"), _names)
_DATA = "data_efficiency."
_several(_DATA, off("the data loader is the program's, and every layer sees every token"),
         "enabled data_sampling.enabled data_sampling.curriculum_learning.enabled "
         "data_sampling.dynamic_batching.enabled data_routing.enabled data_routing.random_ltd.enabled "
         "data_routing.random_ltd.layer_token_lr_schedule.enabled")
_several(_DATA, idle("what it belongs to is not enabled"), "seed data_sampling.num_epochs data_sampling.num_workers "
         "data_sampling.pin_memory data_sampling.curriculum_learning.data_cluster_path")
_several(_DATA + "data_sampling.dynamic_batching.", idle("what it belongs to is not enabled"),
         "metrics_path lr_scaling_method min_batch_size max_batch_size sequence_picking_order max_tokens verbose")
_several(_DATA + "data_routing.random_ltd.", idle("what it belongs to is not enabled"),
         "model_mask_name model_type micro_batch_size global_batch_size sample_idx attention_mask hidden_state_order "
         "random_ltd_layer_num random_ltd_layer_id total_layer_num consumed_layer_tokens total_layer_tokens "
         "layer_token_lr_schedule.total_layer_tokens layer_token_lr_schedule.warmup_type "
         "layer_token_lr_schedule.warmup_layer_tokens random_ltd_schedule.max_value random_ltd_schedule.min_value "
         "random_ltd_schedule.current_value random_ltd_schedule.schedule_type")
_several("weight_quantization.", refused("quantized weights are not there"), "num_bits q_type q_groups")
_several("aio.", idle("every disk has one queue through host memory, submitted to and read as it comes"),
         "single_submit overlap_events thread_count intra_op_parallelism use_gds")
_ON_NVME = {  # what the disks' queues take, where anything is on nvme
    "aio.block_size": whole("plugin.offload_nvme.block_bytes", "block_bytes of [plugin.offload_nvme]", 65536, 2**26,
                            multiple=65536),
    "aio.queue_depth": whole("plugin.offload_nvme.queue_depth", "queue_depth of [plugin.offload_nvme]", 1, 1024),
}
_RULES.update(_ON_NVME)

# Blocks whose names DeepSpeed leaves to the user, or that it has removed: every key in them has the same answer.
_BLOCKS = {
    "scheduler": refused(_SCHEDULER), "zero_pp": refused(_QUANTIZED),
    "datastates_ckpt": refused("checkpoints have a writer of their own"),
    "weight_quantization.quantized_initialization": refused("quantized weights are not there"),
    "weight_quantization.post_init_quant": refused("quantized weights are not there"),
    "tensor_parallel.partition_config": _RULES["tensor_parallel.dtype"],
    "compile.kwargs": _RULES["compile.kwargs"], "autotuning.arg_mappings": _RULES["autotuning.fast"],
    _DATA + "data_sampling.curriculum_learning.curriculum_metrics": _RULES[_DATA + "seed"],
    _DATA + "data_routing.random_ltd.random_ltd_schedule.schedule_config": _RULES[_DATA + "seed"],
    ZERO + "zeropp_loco_param": refused("DeepSpeed has removed it"),
    **{name: refused("DeepSpeed has removed it") for name in (
        "nebula", "compression_training", "amp", "quantize_training", "eigenvalue", "sparse_attention", "elasticity",
        "curriculum_learning", "progressive_layer_drop")},
}
BLOCKS = {path.rpartition(".")[0] for path in _RULES if "." in path} | set(_BLOCKS)
BLOCKS |= {block[:at] for block in BLOCKS for at, letter in enumerate(block) if letter == "."}


def is_known(path):
    return path in _RULES


def rule_of(path, config, on_nvme):
    """The rule of a path of this configuration."""
    top = path.partition(".")[0]
    if top in _BLOCKS or top == "weight_quantization":  # nothing in it counts where it says that it is off
        if isinstance(config.get(top), dict) and config[top].get("enabled") in (False, "auto"):
            return idle(f"{top}.enabled is not true")
    if path in _ON_NVME and not on_nvme:
        return idle("nothing is on nvme")
    if path in _RULES:
        return _RULES[path]
    block = next((rule for name, rule in _BLOCKS.items() if path.startswith(name + ".")), None)
    return block or refused("no known key" + _nearest(path))


def _nearest(path):
    block, _, name = path.rpartition(".")
    if block and block not in BLOCKS:
        return did_you_mean(path, _RULES)
    beside = [known.rpartition(".")[2] for known in _RULES if known.rpartition(".")[0] == block]
    elsewhere = [known for known in _RULES if known.rpartition(".")[2] == name]
    near = [block + "." * bool(block) + word for word in difflib.get_close_matches(name, beside, 1)] or elsewhere
    return f", did you mean {near[0]}?" if near else ""


def plain(path, value):
    """Numbers and truth that a block of checked settings may have as texts, as what they say."""
    checked = path.startswith((ZERO, "bf16.", "bfloat16.", "fp16.")) and not path.endswith("_path")
    if not (checked and isinstance(value, str)):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    return int(value) if value.isdecimal() else value


# ---- what the chosen device and stage make idle ----------------------------------------------------------------------

_ONLY_AT_3 = [ZERO + name for name in ("prefetch_bucket_size", "param_persistence_threshold",
                                       "model_persistence_threshold", "max_live_parameters", "max_reuse_distance")]
_ONLY_ON_NVME = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "fast_init", "pipeline_read",
                 "pipeline_write")


def without_effect(values):
    """{key: why} of a manifest's keys that change nothing beside the others; the engine is told to accept them."""
    found, stage = {}, values.get(ZERO + "stage", 0)
    for part in (OPTIMIZER, PARAM):
        device = values.get(part + "device", "none")
        if device != "nvme":
            found |= {part + name: f"device is {device}" for name in _ONLY_ON_NVME}
        if device == "none":
            found |= {part + name: "device is none" for name in ("pin_memory", "ratio")}
    if _is_number(stage) and stage < 3:
        offloaded = [key for key in values if key.startswith(PARAM)] if values.get(PARAM + "device") != "none" else []
        found |= {key: "only at stage 3" for key in [*_ONLY_AT_3, *offloaded]}
    return {key: why for key, why in found.items() if key in values}
