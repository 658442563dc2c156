"""A DeepSpeed configuration as a manifest: read(config) says for every key what becomes of it.

    honoured        the same setting here, under the same name or one of DeepSpeed's own aliases of it
    mapped          another setting here; `note` says which
    without effect  accepted; `note` says why nothing changes
    refused         Refused is raised, with every such key and its reason: nothing is dropped behind the user's back

Errors name the file, and keys by their path in it. "auto" takes the value that `auto` has for the path, what Hugging
Face derives from the model's hidden size, or is refused. fill() is for programs whose own arguments say the same.
"""
import collections
import contextlib
import copy
import json
import os
import pathlib
import re

from ..errors import InvalidArgument, did_you_mean

Key = collections.namedtuple("Key", "path value status note")
HONOURED, MAPPED, NO_EFFECT = "honoured", "mapped", "without effect"


class Refused(InvalidArgument):
    """Keys of a configuration (`of`) that cannot be had here; `keys` are those, with reasons as notes."""

    def __init__(self, keys, of):
        self.keys, self.of = keys, of
        by_reason = {}
        for key in keys:
            by_reason.setdefault(key.note, []).append(f"{key.path} = {json.dumps(key.value)}")
        super().__init__(f"{of}: " + "; ".join(f"{', '.join(paths)}: {note}" for note, paths in by_reason.items()))


class Configuration(dict):
    """A configuration that knows which file it is from."""

    path = folder = None  # the file as it was named, and the absolute path of where it lies

    def __init__(self, content=(), path=None):
        super().__init__(content)
        if path:
            self.path, self.folder = str(path), pathlib.Path(path).absolute().parent


def name_of(config):
    path = getattr(config, "path", None)
    return "DeepSpeed configuration" + (f" {path}" if path else "")


class Manifest:
    """`text` of the manifest, and `keys`: a Key for every key of the configuration."""

    def __init__(self, values, keys, paths, of):
        self._values, self._of = values, of
        note = "beside a GPU; on the CPU without effect"
        self.keys = [key._replace(note=note) if self._pins_beside_nvme(key) else key for key in keys]
        self._lines = [(key, paths.get(key, key)) for key in sorted(values)]  # with the configuration's path
        self.text = "".join(f"{key} = {_toml(value)}\n" for key, value in sorted(values.items()))

    @contextlib.contextmanager
    def named(self):
        """What the engine says of a line of `text` names the configuration and its key."""
        def name(at):
            key, path = self._lines[int(at[1]) - 1]
            return f"{self._of}: `{path}`" + ("" if at[2] == f"`{key}`" else f": {at[2]}")

        try:
            yield
        except InvalidArgument as error:
            raise InvalidArgument(re.sub(r"manifest text:(\d+):\d+: (\S+)", name, str(error))) from error

    def get(self, path, default=None):
        return self._values.get(path, default)

    def keys_on(self, device_type):
        """The same as `keys`, where it is known what params lie on: "cuda", "cpu", ...; None: it is not."""
        if device_type != "cpu":
            return self.keys
        return [key._replace(status=NO_EFFECT, note="beside nvme only a GPU needs it, and params are on the CPU")
                if self._pins_beside_nvme(key) else key for key in self.keys]

    def _pins_beside_nvme(self, key):
        part, _, name = key.path.rpartition(".")
        return name == "pin_memory" and key.value is True and self.get(part + ".device") == "nvme"

    def report(self, device_type=None):
        """One line per key, those that are not simply honoured first."""
        order = sorted(self.keys_on(device_type), key=lambda key: (key.status == HONOURED, key.path))
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


def whole(key, note, low, high, multiple=1):
    """A whole number of these bounds, for another key here."""
    needed = f"a whole number from {low} to {high}" + (f", a multiple of {multiple}" if multiple > 1 else "")

    def rule(value):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        right = is_number and low <= value <= high and value % multiple == 0
        return (MAPPED, key, int(value), note) if right else (None, None, None, f"{needed} is needed")
    return rule


def off(what):
    return only(False, "off", f"{what} is not there yet")


_ZERO = "zero_optimization."
_NO_FP16 = ("training in fp16 with loss scaling is not there: set fp16.enabled to false and bf16.enabled to true (with "
            "a Trainer, both to \"auto\", and pass bf16=True)")
_RULES = {
    "train_batch_size": same, "train_micro_batch_size_per_gpu": same, "gradient_accumulation_steps": same,
    "steps_per_print": same, "gradient_clipping": same, "wall_clock_breakdown": same, "communication_data_type": same,
    "bf16.enabled": same,
    "bf16.check_grad_overflow": only(True, "gradients are always checked", "gradients are always checked"),
    "bf16.immediate_grad_update": idle("gradients are folded as they come"),
    "bfloat16.enabled": to("bf16.enabled", "an alias of bf16.enabled"),
    "fp16.enabled": only(False, "off", _NO_FP16),
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
for _part, _names in (("offload_optimizer", ("device", "pin_memory", "ratio", "nvme_path", "buffer_count",
                                             "fast_init")),
                      ("offload_param", ("device", "pin_memory", "nvme_path", "buffer_count", "buffer_size",
                                         "max_in_cpu"))):
    for _name in _names:
        _RULES[f"{_ZERO}{_part}.{_name}"] = same
for _name in ("partition_activations", "cpu_checkpointing"):
    _RULES["activation_checkpointing." + _name] = off("moving activations")
for _name in ("contiguous_memory_optimization", "number_checkpoints", "synchronize_checkpoint_boundary", "profile"):
    _RULES["activation_checkpointing." + _name] = idle("checkpointing is the model's")
_ON_NVME = {  # what the disks' queues take, where anything is on nvme
    "aio.block_size": whole("plugin.offload_nvme.block_bytes", "block_bytes of [plugin.offload_nvme]", 65536, 2**26,
                            multiple=65536),
    "aio.queue_depth": whole("plugin.offload_nvme.queue_depth", "queue_depth of [plugin.offload_nvme]", 1, 1024),
}
_RULES.update(_ON_NVME)
for _name in ("single_submit", "overlap_events", "thread_count", "intra_op_parallelism", "use_gds"):
    _RULES["aio." + _name] = idle("every disk has one queue through host memory, submitted to and read as it comes")
# Whole blocks: every key in them has the same answer.
_BLOCKS = {
    "fp16": idle("fp16.enabled is false"), "flops_profiler": idle("not here"),
    "comms_logger": idle("bytes are always counted: core.counters()"),
    "tensorboard": idle("not here"), "wandb": idle("not here"), "csv_monitor": idle("not here"),
    "comet": idle("not here"), "timers": idle("not here"), "scheduler": _RULES["scheduler"],
    "zero_pp": _RULES["zero_pp"],
    _ZERO + "leaf_module": refused("pass units=[...] with the class of the layer"),
}
_REFUSED_BLOCKS = ("scheduler.", "zero_pp.")
_BY_HIDDEN_SIZE = {"reduce_bucket_size": lambda n: n * n, "stage3_prefetch_bucket_size": lambda n: int(0.9 * n * n),
                   "stage3_param_persistence_threshold": lambda n: 10 * n}


_ARE_BLOCKS = {path.rpartition(".")[0] for path in _RULES if "." in path} | set(_BLOCKS)


def load(config):
    """The configuration as a dict: a dict itself, or the path of a JSON file."""
    if isinstance(config, (str, os.PathLike)):
        return loads(pathlib.Path(config).read_text(), config)
    _check_blocks(config, "", name_of(config))
    return config


def loads(text, path=None):
    """The same of a text; `path` is where it is from."""
    found = Configuration(path=path)
    try:
        content = json.loads(text, object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        at = f"{path}:" if path else "line "
        at += f"{error.lineno}:{error.colno}"
        raise InvalidArgument(f"DeepSpeed configuration {at}: no JSON: {error.msg}") from None
    _check_blocks(content, "", name_of(found))
    found.update(content)
    return found


class _Pairs(dict):
    """An object of a JSON text, with the names that it has twice."""

    def __init__(self, pairs):
        super().__init__(pairs)
        counts = collections.Counter(name for name, _ in pairs)
        self.twice = [name for name, count in counts.items() if count > 1]


def _check_blocks(block, path, of):
    """What the rules take for granted."""
    if not isinstance(block, dict):
        raise InvalidArgument(f"{of}: {path or 'all of it'} = {json.dumps(block)}: an object of settings, "
                              f'{{"name": value, ...}}, is needed here')
    twice = [path + "." * bool(path) + name for name in getattr(block, "twice", ())]
    if twice:
        raise InvalidArgument(f"{of}: {', '.join(twice)} is there twice")
    for name, value in block.items():
        inner = path + "." * bool(path) + name
        if isinstance(value, dict) or inner in _ARE_BLOCKS:
            _check_blocks(value, inner, of)


def fill(config, arguments, optional=()):
    """(config, auto) for read: what a program's own arguments {path: (value, name)} say beside the configuration.

    A path that is "auto" or missing takes the argument; those in `optional` are not added. Another value is Refused:
    one of the two would have to be ignored. So is, with it, what read() would refuse.
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
            why = f'{name} is {json.dumps(value)}; "auto" takes it from there'
            wrong.append(Key(path, given, None, _NO_FP16 if path == "fp16.enabled" and given is True else why))
        auto[path] = value
    if wrong:
        known = {key.path for key in wrong}
        raise Refused(wrong + [key for key in _never(config, auto) if key.path not in known], name_of(config))
    return config, auto


def _never(config, auto):
    """Keys that read() refuses, whatever "auto" stands for."""
    on_nvme = _uses_nvme(config, auto)
    for path, value in _leaves(config, ""):
        if value == "auto" and not path.startswith(_REFUSED_BLOCKS):
            continue
        status, _, _, why = _rule(path, on_nvme)(value)
        if status is None:
            yield Key(path, value, None, why)


def hidden_size(model):
    """What Hugging Face takes "auto" sizes from: the largest hidden size that model.config names, or None."""
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        sizes = getattr(part, "hidden_size", None) or max(getattr(part, "hidden_sizes", None) or [0])
        if sizes:
            return sizes
    return None


def read(config, auto=None, hidden_size=None, advice=lambda path: "write it, or pass auto={path: value}"):
    """A Manifest of a DeepSpeed configuration: a dict, or the path of a JSON file. Refused names what cannot be.

    advice(path) ends the message about an "auto" that nobody knows.
    """
    config = load(config)
    values, keys, wrong, paths = {"no_effect_keys": "warn"}, [], [], {}
    on_nvme = _uses_nvme(config, auto or {})
    for path, value in _leaves(config, ""):
        note = ""
        if value == "auto" and not path.startswith(_REFUSED_BLOCKS):
            resolved, note = _resolve(path, auto or {}, hidden_size, advice)
            if resolved is None:
                wrong.append(Key(path, value, None, note))
                continue
            value = resolved
        status, key, setting, why = _rule(path, on_nvme)(value)
        if status is None:
            wrong.append(Key(path, value, None, why))
            continue
        keys.append(Key(path, value, status, why or note))
        if key is None:
            continue
        key = key or path
        if path.endswith(".nvme_path") and (beside := _beside_file(config, setting)):
            keys[-1] = keys[-1]._replace(note=f"relative to the file: {beside}")
            setting = beside
        if key in values and values[key] != setting:
            why = f"contradicts another key for {key}, which is {json.dumps(values[key])}"
            wrong.append(Key(path, value, None, why))
        values[key] = setting
        paths[key] = path
    if wrong:
        raise Refused(wrong, name_of(config))
    if "gradient_clipping" not in values:
        values["gradient_clipping"] = 1.0
        keys.append(Key("gradient_clipping", 1.0, HONOURED, "DeepSpeed's default"))
    for key in keys_without_effect(values):
        keys = [old._replace(status=NO_EFFECT, note=key.note) if old.path.replace("stage3_", "") == key.path else old
                for old in keys]
    return Manifest(values, keys, paths, name_of(config))


def _beside_file(config, directories):
    """Directories, with commas between, where the configuration's file says so, as a manifest's are; None: as they are.

    A configuration that is of no file is the program's own word: there they are of the working directory.
    """
    folder = getattr(config, "folder", None)
    if not folder or not isinstance(directories, str):
        return None
    names = [name.strip() for name in directories.split(",") if name.strip()]
    if all(map(os.path.isabs, names)):
        return None
    return ", ".join(str(folder / name) for name in names)


def keys_without_effect(values):
    """Legal keys that change nothing for the chosen device or stage; the engine is told to accept them."""
    for part in ("offload_optimizer", "offload_param"):
        device = values.get(f"{_ZERO}{part}.device", "none")
        for name in ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "fast_init"):
            if f"{_ZERO}{part}.{name}" in values and device != "nvme":
                yield Key(f"{_ZERO}{part}.{name}", None, NO_EFFECT, f"device is {device}")
    ratio = _ZERO + "offload_optimizer.ratio"
    if ratio in values and values.get(_ZERO + "offload_optimizer.device", "none") == "none":
        yield Key(ratio, None, NO_EFFECT, "device is none")
    stage = values.get(_ZERO + "stage", 0)
    if isinstance(stage, int) and stage < 3:
        for name in ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters",
                     "max_reuse_distance"):
            if _ZERO + name in values:
                yield Key(_ZERO + name, None, NO_EFFECT, "only at stage 3")


def _leaves(config, prefix):
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        elif not (value is None and prefix + name in _RULES):  # null is DeepSpeed's word for the default
            yield prefix + name, value


def _uses_nvme(config, auto):
    def device(part):
        path = f"{_ZERO}{part}.device"
        given = config.get("zero_optimization", {}).get(part, {}).get("device")
        return auto.get(path) if given == "auto" else given

    return "nvme" in (device("offload_optimizer"), device("offload_param"))


def _rule(path, on_nvme):
    if path in _ON_NVME and not on_nvme:
        return idle("nothing is on nvme")
    if path in _RULES:
        return _RULES[path]
    for block, rule in _BLOCKS.items():
        if path.startswith(block + "."):
            return rule
    return refused("no known key" + did_you_mean(path, _RULES))


def _resolve(path, auto, hidden_size, advice):
    """(value, note) of an "auto"; (None, reason) when nobody knows."""
    if path in auto:
        return auto[path], "auto, as given"
    name = path.removeprefix(_ZERO)
    if name in _BY_HIDDEN_SIZE and hidden_size:
        return _BY_HIDDEN_SIZE[name](hidden_size), f"auto, from the model's hidden size {hidden_size}"
    if name in _BY_HIDDEN_SIZE:
        return None, f'"auto" has no value here: the model has no config.hidden_size to take it from; {advice(path)}'
    return None, f'"auto" has no value here: {advice(path)}'


def _toml(value):
    if isinstance(value, float) and value.is_integer() and abs(value) >= 1e4:
        return str(int(value))
    return json.dumps(value)
