"""What the configuration, the Accelerator's arguments and the loop's own objects say, brought to agree before a run."""
import os
import pathlib

from ..deepspeed import config as deepspeed
from ..errors import InvalidArgument
from . import config as files
from . import optimizer as optimizers


_DEFAULTS = {  # accelerate's own, where nothing says otherwise
    "gradient_clipping": 1.0, "zero_optimization.stage3_gather_16bit_weights_on_model_save": False}


def refuse_foreign_launch():
    """accelerate's own launcher puts its DeepSpeed settings into the environment, for DeepSpeed to read."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise InvalidArgument("started by `accelerate launch` with a DeepSpeed configuration, for DeepSpeed: start "
                              "with `python -m strata.accelerate launch --config_file FILE ...`")


def file_of(config):
    """The configuration, of whichever kind, as a config.File."""
    if isinstance(config, (str, os.PathLike)) and pathlib.Path(config).suffix in (".yaml", ".yml"):
        return files.read(config)
    if config is not None:
        return files.File(deepspeed.load(config), {}, None, False, [])
    file = files.from_environment()
    if file is None:
        raise InvalidArgument("Accelerator needs config: a DeepSpeed configuration, or Accelerate's YAML file")
    return file


def accumulation(config, steps):
    """gradient_accumulation_steps; `steps` is the Accelerator's argument, whose default is 1."""
    given = config.get("gradient_accumulation_steps")
    if given in (None, "auto"):
        return steps
    if steps not in (1, given):
        raise InvalidArgument(f"Accelerator(gradient_accumulation_steps={steps}): the configuration has {given}")
    return given


def precision(file):
    """mixed_precision where the Accelerator was given none."""
    if file.mixed_precision is not None:
        return file.mixed_precision
    block = file.deepspeed.get("bf16") or file.deepspeed.get("bfloat16") or {}
    return "bf16" if block.get("enabled") is True else "no"


def manifest(accelerator, config, auto, model, optimizer, loaders):
    """The deepspeed.Manifest of a configuration for a loop; optimizer may be None. `auto` wins over what is found."""
    config, found = deepspeed.fill(config, _arguments(accelerator, config, optimizer, loaders))
    idle = {} if optimizer is not None else _untrained(accelerator)
    return deepspeed.read(config, {**_DEFAULTS, **idle, **found, **auto}, deepspeed.hidden_size(model), _advice)


def _advice(path):
    """What to do about an "auto" that nothing here knows."""
    if path in ("train_micro_batch_size_per_gpu", "train_batch_size"):
        return "prepare the data loader in the same call as the model, or write it in the configuration"
    return "write it in the configuration"


def _arguments(accelerator, config, optimizer, loaders):
    """What the loop's own objects say, which the configuration may say too: see deepspeed.fill."""
    found, steps = {}, accelerator.gradient_accumulation_steps
    for name in ("bf16", "bfloat16", "fp16"):
        if "enabled" in config.get(name, {}) or (name == "bf16" and "bfloat16" not in config):
            is_on = name != "fp16" and accelerator.mixed_precision == "bf16"
            found[name + ".enabled"] = (is_on, f"for mixed_precision {accelerator.mixed_precision!r} it")
    if config.get("gradient_accumulation_steps") in (None, "auto"):
        found["gradient_accumulation_steps"] = (steps, "Accelerator's gradient_accumulation_steps")
    sizes = [loader.batch_size for loader in loaders if loader.batch_size]
    if sizes:
        size = sizes[0] // accelerator.num_processes if accelerator.split_batches else sizes[0]
        found["train_micro_batch_size_per_gpu"] = (size, "the first data loader's batch size per rank")
        if "train_batch_size" in config:
            total = size * accelerator.num_processes * steps
            found["train_batch_size"] = (total, "batch size per rank * ranks * gradient_accumulation_steps")
    if optimizer is None:
        return found
    found["optimizer.type"] = (optimizers.kind(optimizer), "the loop's optimizer")
    given = config.get("optimizer", {}).get("params", {})
    for name, values in optimizers.settings(optimizer).items():
        if name in given:  # any of its groups may be meant
            value = given[name] if given[name] in values else values[0]
            found["optimizer.params." + name] = (value, f"the optimizer's {name}")
    return found


def _untrained(accelerator):
    """For a model without an optimizer, which is never trained: what "auto" may stand for all the same."""
    params = {"lr": 0.0, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    return {"train_micro_batch_size_per_gpu": 1,
            "train_batch_size": accelerator.num_processes * accelerator.gradient_accumulation_steps,
            **{f"optimizer.params.{name}": value for name, value in params.items()}}
