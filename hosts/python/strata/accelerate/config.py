"""The file that `accelerate launch --config_file` takes, as a DeepSpeed configuration and the settings of a launch.

Every key has one of the answers of strata.deepspeed: honoured, mapped, without effect, or refused, all refusals at
once. A key that is not known is refused with the nearest that is.
"""
import collections
import os
import pathlib

import yaml  # of PyPI, as transformers and accelerate bring it

from ..deepspeed import config as deepspeed
from ..deepspeed.config import HONOURED, MAPPED, NO_EFFECT, Key, Refused
from ..errors import did_you_mean

ENVIRONMENT = "STRATA_ACCELERATE_CONFIG"  # the launcher's word to the program: the path of the file

# deepspeed: the configuration as a dict; launch: {key: value} for the launcher; keys: a Key for every key of the file
File = collections.namedtuple("File", "deepspeed launch mixed_precision use_cpu keys")

_DEEPSPEED = {  # key of deepspeed_config: path in DeepSpeed's own configuration
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "gradient_accumulation_steps": "gradient_accumulation_steps", "gradient_clipping": "gradient_clipping",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
_LAUNCH = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids")
_EMPTY = (None, "", {}, [], False)
_IDLE = {  # key: (values that change nothing, why others are refused)
    "compute_environment": (("LOCAL_MACHINE",), "only LOCAL_MACHINE is there"),
    "distributed_type": (("DEEPSPEED",), "only DEEPSPEED has a configuration to shard by"),
    "main_training_function": (("main",), "programs are run as scripts"),
    "debug": (_EMPTY, "the engine always checks that ranks agree"),
    "downcast_bf16": ((*_EMPTY, "no"), "it is for TPUs"),
    "enable_cpu_affinity": (_EMPTY, "bind ranks with the launcher"),
    "dynamo_backend": ((*_EMPTY, "NO", "no"), "pass dynamo_backend to Accelerator, or torch_compile to a Trainer"),
    "dynamo_config": (_EMPTY, "pass dynamo_backend to Accelerator, or torch_compile to a Trainer"),
    "fp16": (_EMPTY, "training in fp16 with loss scaling is not there; use mixed_precision: bf16"),
    "rdzv_backend": ((*_EMPTY, "static"), "only static is there"),
    "same_network": ((*_EMPTY, True), ""),
    "deepspeed_config.zero3_init_flag": ((*_EMPTY, True), ""),
    "deepspeed_config.deepspeed_multinode_launcher": ((*_EMPTY, "standard"), "start every machine yourself: standard"),
}
for _name in ("fp8_config", "fsdp_config", "megatron_lm_config", "mpirun_config", "parallelism_config", "tpu_name",
              "tpu_use_cluster", "tpu_use_sudo", "tpu_env", "tpu_vm", "tpu_zone", "command_file", "commands"):
    _IDLE[_name] = (_EMPTY, "not here")
for _name in ("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter"):
    _IDLE["deepspeed_config." + _name] = (_EMPTY, "start every machine yourself")
_IDLE["deepspeed_config.deepspeed_moe_layer_cls_names"] = (_EMPTY, "pass units=[...] with the class of the layer")
_NOTES = {"deepspeed_config.zero3_init_flag": "build the model in `with strata.torch.init():`",
          "same_network": "ranks find each other by main_process_ip"}
_KNOWN = [*_IDLE, *_LAUNCH, "mixed_precision", "use_cpu", "deepspeed_config.deepspeed_config_file",
          *("deepspeed_config." + name for name in _DEEPSPEED)]


def read(path):
    """A File; Refused names what cannot be."""
    content = yaml.safe_load(pathlib.Path(path).read_text()) or {}
    keys, wrong = [], []
    for name, value in _leaves(content):
        key = _key(name, value)
        (keys if key.status else wrong).append(key)
    block = content.get("deepspeed_config") or {}
    if content.get("distributed_type") is None:
        wrong.append(Key("distributed_type", None, None, "the file must say DEEPSPEED"))
    file, also = block.get("deepspeed_config_file"), [name for name in _DEEPSPEED if block.get(name) is not None]
    if file:
        wrong += [Key("deepspeed_config." + name, block[name], None, "it is in deepspeed_config_file, say it there")
                  for name in also]
    if wrong:
        raise Refused(wrong, f"Accelerate configuration {path}")
    config = deepspeed.load(file) if file else deepspeed.Configuration(_from_block(block, also), path)
    precision = str(content.get("mixed_precision") or "no")
    if content.get("mixed_precision") is not None:
        bf16 = config.setdefault("bf16", {})
        if bf16.setdefault("enabled", "auto") == "auto":
            bf16["enabled"] = precision == "bf16"
    return File(config, {name: content[name] for name in _LAUNCH if content.get(name) is not None}, precision,
                bool(content.get("use_cpu")), keys)


def from_environment():
    """The File that the launcher names, or None."""
    path = os.environ.get(ENVIRONMENT)
    return read(path) if path else None


def _leaves(content):
    for name, value in content.items():
        if name == "deepspeed_config" and isinstance(value, dict):
            yield from ((f"{name}.{inner}", value) for inner, value in value.items())
        elif name != "deepspeed_config" or value:
            yield name, value


def _key(name, value):
    short = name.removeprefix("deepspeed_config.")
    if name in _IDLE:
        harmless, reason = _IDLE[name]
        if value in harmless:
            return Key(name, value, NO_EFFECT, _NOTES.get(name, "there is nothing to choose here"))
        return Key(name, value, None, reason)
    if name == "mixed_precision":
        if value in (None, "no", "bf16", False):
            return Key(name, value, MAPPED, "bf16.enabled")
        return Key(name, value, None, "weights are fp32 or bf16: use bf16")
    if name in _LAUNCH or name == "use_cpu":
        return Key(name, value, HONOURED, "")
    if name != short and (short in _DEEPSPEED or short == "deepspeed_config_file"):
        return Key(name, value, MAPPED, _DEEPSPEED.get(short, "the configuration itself"))
    return Key(name, value, None, "no known key" + did_you_mean(name, _KNOWN))


def _from_block(block, names):
    config = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    for name in names:
        *outer, last = _DEEPSPEED[name].split(".")
        part = config
        for step in outer:
            part = part.setdefault(step, {})
        part[last] = block[name]
    return config
