"""A DeepSpeed configuration as a manifest: read(config) says for every key what becomes of it.

    honoured        the same setting here, under the same name or one of DeepSpeed's own aliases of it
    mapped          another setting here; `note` says which
    without effect  accepted; `note` says why nothing changes
    refused         Refused is raised, with every such key and its reason: nothing is dropped behind the user's back

Keys are named by their path in the JSON file. "auto" takes the value that `auto` has for the path, what Hugging Face
derives from the model's hidden size, or is refused. fill() is for programs whose own arguments say the same things.
"""
import collections
import copy
import difflib
import json
import os
import pathlib

from ..errors import InvalidArgument

Key = collections.namedtuple("Key", "path value status note")
HONOURED, MAPPED, NO_EFFECT = "honoured", "mapped", "without effect"


class Refused(InvalidArgument):
    """Keys of a DeepSpeed configuration that cannot be had here; `keys` are those, with reasons as notes."""

    def __init__(self, keys, of="DeepSpeed configuration"):
        self.keys = keys
        super().__init__(f"{of}: " + "; ".join(f"{key.path} = {json.dumps(key.value)}: {key.note}" for key in keys))


class Manifest:
    """`text` of the manifest, and `keys`: a Key for every key of the configuration."""

    def __init__(self, values, keys):
        self.keys = keys
        self._values = values
        self.text = "".join(f"{path} = {_toml(value)}\n" for path, value in sorted(values.items()))

    def get(self, path, default=None):
        return self._values.get(path, default)

    def report(self):
        """One line per key, those that are not simply honoured first."""
        order = sorted(self.keys, key=lambda key: (key.status == HONOURED, key.path))
        return [line(key) for key in order]


def line(key):
    """A Key as a line of a report."""
    return f"{key.path} = {json.dumps(key.value)}: {key.status}" + (f": {key.note}" if key.note else "")


# ---- the rules: path -> function(value) of (status, manifest key or None, manifest value, note) ----------------------


def same(value):
    return HONOURED, "", value, ""


def to(key, note="", convert=lambda value: value):
    return lambda value: (MAPPED if note else HONOURED, key, convert(value), note)


def idle(note):
    return lambda value: (NO_EFFECT, None, None, note)


def only(allowed, note, reason):
    """Without effect at the one value that is what happens here, refused otherwise."""
    return lambda value: (NO_EFFECT, None, None, note) if value == allowed else (None, None, None, reason)


def refused(reason):
    return lambda value: (None, None, None, reason)


def off(what):
    return only(False, "off", f"{what} is not there yet")


_ZERO = "zero_optimization."
_RULES = {
    "train_batch_size": same, "train_micro_batch_size_per_gpu": same, "gradient_accumulation_steps": same,
    "steps_per_print": same, "gradient_clipping": same, "wall_clock_breakdown": same, "communication_data_type": same,
    "bf16.enabled": same,
    "bf16.check_grad_overflow": only(True, "gradients are always checked", "gradients are always checked"),
    "bf16.immediate_grad_update": idle("gradients are folded as they come"),
    "bfloat16.enabled": to("bf16.enabled", "an alias of bf16.enabled"),
    "fp16.enabled": only(False, "off", "training in fp16 with loss scaling is not there; use bf16.enabled"),
    "prescale_gradients": only(False, "off", "sums are divided once, in the update"),
    "gradient_predivide_factor": only(1.0, "1", "sums are divided once, in the update"),
    "optimizer.type": lambda value: same(value) if value in ("AdamW", "Adam") else refused(
        'the optimizers are "AdamW" and "Adam"')(value),
    "optimizer.params.torch_adam": idle("there is one implementation"),
    "optimizer.params.fused": idle("there is one implementation"),
    "optimizer.params.bias_correction": only(True, "always on", "bias correction cannot be switched off"),
    "optimizer.params.amsgrad": only(False, "off", "AMSGrad is not there"),
    "scheduler": refused("use a scheduler of torch: initialize(lr_scheduler=function of the optimizer); with a Trainer "
                         "its lr_scheduler_type, constant_with_warmup for WarmupLR, linear for WarmupDecayLR"),
    "zero_allow_untested_optimizer": idle("the optimizer is a plugin"),
    "zero_force_ds_cpu_optimizer": idle("the optimizer is a plugin"),
    "dataloader_drop_last": idle("no data loader is made"), "memory_breakdown": idle("the plan is always printed"),
    "dump_state": idle("settings are always logged"), "disable_allgather": off("leaving out all-gathers"),
    "sparse_gradients": off("sparse gradients"), "zero_pp": refused("quantized communication is not there yet"),
    "tensor_model_parallel_size": same, "pipeline_model_parallel_size": same,
    _ZERO + "round_robin_gradients": idle("every rank has an equal share"),
    _ZERO + "reduce_scatter": only(True, "always", "gradients are reduced by reduce-scatter only"),
    _ZERO + "load_from_fp32_weights": idle("checkpoints have the fp32 master"),
    _ZERO + "elastic_checkpoint": idle("checkpoints load at any world size"),
    _ZERO + "zero_hpz_partition_size": only(1, "1", "secondary partitions are not there yet"),
    _ZERO + "cpu_offload": to(_ZERO + "offload_optimizer.device", "zero_optimization.offload_optimizer.device",
                              lambda value: "cpu" if value else "none"),
    _ZERO + "cpu_offload_param": to(_ZERO + "offload_param.device", "zero_optimization.offload_param.device",
                                    lambda value: "cpu" if value else "none"),
    _ZERO + "stage3_gather_fp16_weights_on_model_save": to(_ZERO + "gather_16bit_weights_on_model_save",
                                                           "its older name"),
    _ZERO + "offload_optimizer.ratio": only(1.0, "all of it", "a part of the optimizer on the device is not there yet"),
    _ZERO + "offload_optimizer.pipeline_read": idle("reads, updates and writes always overlap"),
    _ZERO + "offload_optimizer.pipeline_write": idle("reads, updates and writes always overlap"),
    _ZERO + "offload_optimizer.cpuadam_cores_perc": idle("the manifest's `threads` says how many"),
}
for _name in ("lr", "betas", "eps", "weight_decay", "adam_w_mode"):
    _RULES["optimizer.params." + _name] = same
for _name in ("stage", "overlap_comm", "contiguous_gradients", "reduce_bucket_size", "sub_group_size"):
    _RULES[_ZERO + _name] = same
for _name in ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance",
              "gather_16bit_weights_on_model_save"):
    _RULES[_ZERO + _name] = same
    _RULES[_ZERO + "stage3_" + _name] = to(_ZERO + _name)
for _name in ("allgather_partitions", "allgather_bucket_size", "use_multi_rank_bucket_allreduce", "legacy_stage1",
              "ignore_unused_parameters", "memory_efficient_linear", "log_trace_cache_warnings",
              "override_module_apply", "stage3_module_granularity_threshold",
              "stage3_use_all_reduce_for_fetch_params", "parameter_alignment",
              "stage3_allgather_sequential", "compute_grad_norm", "enable_sanity_checks",
              "pipeline_loading_checkpoint"):
    _RULES[_ZERO + _name] = idle("there is nothing to choose here")
for _name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"):
    _RULES[_ZERO + _name] = off("quantized communication")
for _part, _names in (("offload_optimizer", ("device", "pin_memory", "nvme_path", "buffer_count", "fast_init")),
                      ("offload_param", ("device", "pin_memory", "nvme_path", "buffer_count", "buffer_size",
                                         "max_in_cpu"))):
    for _name in _names:
        _RULES[f"{_ZERO}{_part}.{_name}"] = same
for _name in ("partition_activations", "cpu_checkpointing"):
    _RULES["activation_checkpointing." + _name] = off("moving activations")
for _name in ("contiguous_memory_optimization", "number_checkpoints", "synchronize_checkpoint_boundary", "profile"):
    _RULES["activation_checkpointing." + _name] = idle("checkpointing is the model's")
# Whole blocks: every key in them has the same answer.
_BLOCKS = {
    "fp16": idle("fp16.enabled is false"), "aio": idle("options of [plugin.offload_nvme] in a manifest"),
    "flops_profiler": idle("not here"), "comms_logger": idle("bytes are always counted: core.counters()"),
    "tensorboard": idle("not here"), "wandb": idle("not here"), "csv_monitor": idle("not here"),
    "comet": idle("not here"), "timers": idle("not here"), "scheduler": _RULES["scheduler"],
    "zero_pp": _RULES["zero_pp"],
    _ZERO + "leaf_module": refused("pass units=[...] with the class of the layer"),
}
_REFUSED_BLOCKS = ("scheduler.", "zero_pp.")
_BY_HIDDEN_SIZE = {"reduce_bucket_size": lambda n: n * n, "stage3_prefetch_bucket_size": lambda n: int(0.9 * n * n),
                   "stage3_param_persistence_threshold": lambda n: 10 * n}


def load(config):
    """The configuration as a dict: a dict itself, or the path of a JSON file."""
    if isinstance(config, (str, os.PathLike)):
        return json.loads(pathlib.Path(config).read_text(), object_pairs_hook=_no_duplicates)
    return config


def fill(config, arguments, optional=()):
    """(config, auto) for read: what a program's own arguments {path: (value, name)} say beside the configuration.

    A path that is "auto" or missing takes the argument; those in `optional` are not added. Another value is Refused:
    one of the two would have to be ignored.
    """
    config, wrong, auto = copy.deepcopy(load(config)), [], {}
    for path, (value, name) in arguments.items():
        *outer, last = path.split(".")
        block = config
        for part in outer:
            block = block.get(part, {}) if path in optional else block.setdefault(part, {})
        given = block.get(last)
        if given is None and path not in optional:
            block[last] = "auto"
        elif given not in (None, "auto") and given != value:
            wrong.append(Key(path, given, None, f'{name} is {json.dumps(value)}; "auto" takes it from there'))
        auto[path] = value
    if wrong:
        raise Refused(wrong)
    return config, auto


def hidden_size(model):
    """What Hugging Face takes "auto" sizes from: the largest hidden size that model.config names, or None."""
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        sizes = getattr(part, "hidden_size", None) or max(getattr(part, "hidden_sizes", None) or [0])
        if sizes:
            return sizes
    return None


def read(config, auto=None, hidden_size=None):
    """A Manifest of a DeepSpeed configuration: a dict, or the path of a JSON file. Refused names what cannot be."""
    values, keys, wrong = {"no_effect_keys": "warn"}, [], []
    for path, value in _leaves(load(config), ""):
        note = ""
        if value == "auto" and not path.startswith(_REFUSED_BLOCKS):
            resolved, note = _resolve(path, auto or {}, hidden_size)
            if resolved is None:
                wrong.append(Key(path, value, None, note))
                continue
            value = resolved
        status, key, setting, why = _rule(path)(value)
        if status is None:
            wrong.append(Key(path, value, None, why))
            continue
        keys.append(Key(path, value, status, why or note))
        if key is None:
            continue
        key = key or path
        if key in values and values[key] != setting:
            why = f"contradicts another key for {key}, which is {json.dumps(values[key])}"
            wrong.append(Key(path, value, None, why))
        values[key] = setting
    if wrong:
        raise Refused(wrong)
    if "gradient_clipping" not in values:
        values["gradient_clipping"] = 1.0
        keys.append(Key("gradient_clipping", 1.0, HONOURED, "DeepSpeed's default"))
    for key in keys_without_effect(values):
        keys = [old._replace(status=NO_EFFECT, note=key.note) if old.path.replace("stage3_", "") == key.path else old
                for old in keys]
    return Manifest(values, keys)


def keys_without_effect(values):
    """Legal keys that change nothing for the chosen device or stage; the engine is told to accept them."""
    for part in ("offload_optimizer", "offload_param"):
        device = values.get(f"{_ZERO}{part}.device", "none")
        for name in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "fast_init"):
            if f"{_ZERO}{part}.{name}" in values and device != "nvme":
                yield Key(f"{_ZERO}{part}.{name}", None, NO_EFFECT, f"device is {device}")
    if values.get(_ZERO + "stage", 0) < 3:
        for name in ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters",
                     "max_reuse_distance"):
            if _ZERO + name in values:
                yield Key(_ZERO + name, None, NO_EFFECT, "only at stage 3")


def _no_duplicates(pairs):
    counts = collections.Counter(key for key, _ in pairs)
    twice = [key for key, count in counts.items() if count > 1]
    if twice:
        raise InvalidArgument(f"DeepSpeed configuration: {', '.join(twice)} is there twice")
    return dict(pairs)


def _leaves(config, prefix):
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        elif not (value is None and prefix + name in _RULES):  # null is DeepSpeed's word for the default
            yield prefix + name, value


def _rule(path):
    if path in _RULES:
        return _RULES[path]
    for block, rule in _BLOCKS.items():
        if path.startswith(block + "."):
            return rule
    near = difflib.get_close_matches(path, _RULES, 1)
    return refused("no known key" + (f", did you mean {near[0]}?" if near else ""))


def _resolve(path, auto, hidden_size):
    """(value, note) of an "auto"; (None, reason) when nobody knows."""
    if path in auto:
        return auto[path], "auto, as given"
    name = path.removeprefix(_ZERO)
    if name in _BY_HIDDEN_SIZE and hidden_size:
        return _BY_HIDDEN_SIZE[name](hidden_size), f"auto, from the model's hidden size {hidden_size}"
    return None, '"auto" has no value here: a Trainer or a data loader knows it, or pass auto={path: value}'


def _toml(value):
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1e4:
        return str(int(value))
    return json.dumps(value)
