"""prepare: hands a model's params to an engine. See docs/pytorch.md."""
import contextlib
import ctypes

import torch
from torch import nn

from .. import _abi
from ..engine import Engine as CoreEngine
from ..errors import InvalidArgument, did_you_mean
from ..model import SETTINGS
from . import autocast, memory, state, units as unit_rules
from .engine import Engine
from .groups import ParamGroup
from .initial import Initial
from .weights import Entry, Unit


def prepare(model, manifest=None, *, units=None, unit_size=unit_rules.UNIT_SIZE, groups=None, weights=None,
            init_weights=None, **engine):
    """Opens an engine and hands it the model's params, which from then on are whole inside their module's forward only.

    model      built in the same way on every rank; the values of rank 0 win. Its class and its code stay as they are
    manifest   path of the TOML file; further arguments (text, overrides, log, thread_rank, ...) are strata.Engine's
    units      what is fetched together: class names or classes, or a function (name, module) -> bool; None: the blocks
               that repeat in the model's lists. units.py says where the rest goes
    unit_size  elements of the largest unit made out of what is not a block
    groups     as a torch optimizer takes them: [{"params": [...], "lr": ..., "betas": ..., "eps": ..., "weight_decay":
               ...}]; params in none of them have the manifest's settings
    weights    first values by name, of all params and of buffers if they are there: a dict of tensors, a safetensors
               file, or a folder of them, read on rank 0, one unit at a time
    init_weights  function(module) that fills the params of one module of a model built in strata.torch.init(); what it
               leaves, a Hugging Face model's own fills, and what that leaves the module's reset_parameters

    With bf16.enabled, float32 params become bfloat16, and the optimizer's master starts from the float32 values. Frozen
    params (requires_grad = False) have no optimizer state. Collective. Returns the Engine.

    Under model parallelism the model is this rank's part, and rank 0 is that of the data-parallel group. Megatron's
    attributes say what the norm counts: param.tensor_model_parallel, param.shared.
    """
    if not isinstance(model, nn.Module) or isinstance(model, (nn.ParameterList, nn.ParameterDict)):
        raise InvalidArgument(f"prepare takes a module that is called, not a {type(model).__name__}")
    if isinstance(manifest, dict) or str(manifest).endswith(".json"):
        what = "a dict" if isinstance(manifest, dict) else f'"{manifest}"'
        raise InvalidArgument(f"prepare takes a manifest in TOML, not {what}: a DeepSpeed configuration goes to "
                              f"strata.deepspeed.initialize(model=..., config=...)")
    for name, param in model.named_parameters():
        _check(name, param)
    initial = Initial(model, weights, init_weights)
    initial.check()
    found = unit_rules.choose(model, units, unit_size)
    if torch.cuda.is_available():
        engine.setdefault("gradient_memory", memory.Lender())
    core = CoreEngine(manifest, **engine)
    try:
        return _register(model, core, found, groups or [], initial)
    except BaseException as error:
        core.close(error)
        raise


def _register(model, core, found, groups, initial):
    param_groups, group_of = _groups(core, groups, found)
    to_bf16 = core.setting("bf16.enabled") == "true"
    entries, all_units = {}, []
    for name, module, params in found:
        unit = Unit(name or type(model).__name__, module)
        unit.core = core.unit(unit.name)
        all_units.append(unit)
        for param_name, param in params.items():
            owner = entries.get(id(param))
            dtype = torch.bfloat16 if to_bf16 and param.dtype == torch.float32 else param.dtype
            entry = owner or Entry(param_name, unit, param, dtype)
            registered = unit.core.param(
                param_name, tuple(param.shape), memory.DTYPES[dtype][0], group=group_of.get(id(param)),
                frozen=not param.requires_grad, tied_to=owner.core if owner else None,
                tensor_model_parallel=not owner and getattr(param, "tensor_model_parallel", False),
                shared=not owner and getattr(param, "shared", False))
            if not owner:
                entry.core = registered
                entries[id(param)] = entry
            entry.units.append(unit)
            unit.entries[entry] = None
            unit.trainable += entry.trainable
        unit.autocast = autocast.targets(unit)
    core.commit()
    device = _device(core, next(iter(entries.values())))
    _check_place(core, entries.values(), device)
    for unit in all_units:
        _write(unit, initial, core.ranks.data_parallel_rank == 0)
        for entry in unit.owned():
            entry.place(device)
    initial.fill_buffers()
    return Engine(model, core, all_units, list(entries.values()), param_groups, device)


def _check(name, param):
    if type(param) is not torch.nn.Parameter:
        raise InvalidArgument(f'param "{name}" is a {type(param).__name__}; prepare takes plain torch.nn.Parameter (a '
                              f"lazy module's first forward makes them) and no model twice")
    if param.dtype not in memory.DTYPES:
        raise InvalidArgument(f'param "{name}" is {param.dtype}; the engine takes float32, bfloat16 and float16')
    if param.grad is not None:
        raise InvalidArgument(f'param "{name}" has a gradient already: prepare the model before its first backward')


def _groups(core, groups, found):
    """(engine.param_groups, {id of a param: its Group})"""
    params = {id(p): name for unit in found for name, p in unit.params.items()}
    result, of = [ParamGroup(0, None, {})], {}
    for number, given in enumerate(groups):
        known = ("params", *SETTINGS)
        if not isinstance(given, dict) or "params" not in given:
            raise InvalidArgument(f'groups[{number}] must be a dict with "params", as a torch optimizer takes it')
        for key in given:
            if key not in known:
                raise InvalidArgument(f"groups[{number}] has {key!r}{did_you_mean(str(key), known)} (a group has "
                                      f"params and {', '.join(SETTINGS)})")
        settings = {key: given.get(key) for key in SETTINGS}
        group = core.group(**settings)
        params_given = given["params"]
        for param in [params_given] if isinstance(params_given, torch.Tensor) else params_given:
            param = param[1] if isinstance(param, tuple) else param  # of named_parameters()
            if not isinstance(param, torch.Tensor):
                raise InvalidArgument(f"groups[{number}] has a {type(param).__name__} where a param belongs: params "
                                      f"are tensors, or pairs of a name and a tensor")
            if id(param) not in params:
                raise InvalidArgument(f"groups[{number}] has a tensor of shape {tuple(param.shape)} that is no param "
                                      f"of the model")
            if id(param) in of:
                raise InvalidArgument(f'param "{params[id(param)]}" is in two groups')
            of[id(param)] = group
        result.append(ParamGroup(number + 1, group, settings))
    return tuple(result), of


def _check_place(core, entries, device):
    for entry in entries:
        if entry.param.is_cuda and device.type == "cpu":
            raise InvalidArgument(f'param "{entry.name}" is on {entry.param.device}, and plugins.device = '
                                  f'"{core.setting("plugins.device")}" trains in host memory: choose "device_cuda" '
                                  f"(docs/pytorch.md, \"On GPUs\"), or leave the model on the CPU")


def _write(unit, initial, is_root):
    """First values of the params that a unit owns. What goes wrong on rank 0 is an error on all ranks."""
    entries = unit.owned()
    try:
        values = initial.of(unit, entries) if is_root else {}
    except Exception:
        with contextlib.suppress(InvalidArgument):
            state.write(entries[0], None, root=0)
        raise
    for entry in entries:
        try:
            state.write(entry, values.pop(entry, None), root=0)
        except InvalidArgument as error:
            raise initial.explained(error, entry) from None


def _device(core, entry):
    """Where the engine's weights will lie. A released param's view says so, though it has no data."""
    struct = _abi.strata_tensor()
    core._lib.strata_param_view(core._handle, entry.core.number, ctypes.byref(struct))
    return memory.device_of(struct)
