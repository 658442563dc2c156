"""Where params get their first values: from the model as it is built, from its layers' own initialisation, from files.

    with strata.torch.init():
        model = Model()                       # params have shapes and no memory, buffers are real
    engine = strata.torch.prepare(model, "train.toml")

A model of that kind never exists whole: prepare goes through its units, makes one unit's params at a time on rank 0,
lets the layers fill them as they do when they are built, and hands them to the engine, which shards them. What is made
is NaN, and a param that still has one afterwards is refused: it would be trained from whatever lay in memory.
"""
import contextlib
import math
import os
import pathlib
import sys
import threading

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import InvalidArgument, NotFound


@contextlib.contextmanager
def init():
    """Params of modules that this thread builds inside go to the meta device when they are registered; buffers stay."""
    made = WeakIdKeyDictionary()  # a Parameter that is registered twice, under two names, stays one
    thread = threading.get_ident()

    def to_meta(module, name, param):
        if threading.get_ident() != thread or type(param) is not nn.Parameter or param.is_meta:
            return None
        if param not in made:
            made[param] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
            made[param].__dict__.update(param.__dict__)  # such as Megatron's tensor_model_parallel
        return made[param]

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()

_WAYS = ("init_weights", "_init_weights of the model around it", "reset_parameters")


class Initial:
    """First values of a model's params; `weights` and `init_weights` are prepare's."""

    def __init__(self, model, weights, init_weights):
        self._model, self._given = model, init_weights
        self._weights = _open(weights)
        self._init_of = {}  # what the Hugging Face model around a module fills it with, once it is built
        self._find_init(model, getattr(model, "_init_weights", None))
        self._holders = {}  # of a param on the meta device, by its id: the modules that have it, with its name there
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is not None and param.is_meta:
                    self._holders.setdefault(id(param), []).append((module, name))

    def _find_init(self, module, init):
        if isinstance(module, getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", ())):
            init = module._init_weights
        if init:
            self._init_of.setdefault(module, init)
        for child in module.children():
            self._find_init(child, init)

    def check(self):
        """Every param may have values; InvalidArgument names those that cannot, and values that have no param."""
        for name, buffer in self._model.named_buffers():
            if buffer.is_meta:
                raise InvalidArgument(f'buffer "{name}" is on the meta device, and prepare leaves buffers as they are: '
                                      f"build the model in strata.torch.init() instead, where they stay real")
        if self._weights is not None:
            self._check_names()
            return
        for name, param in self._model.named_parameters():
            holders = self._holders.get(id(param), ())
            if holders and not any(self._ways(module) for module, _ in holders):
                raise InvalidArgument(
                    f'param "{name}" is on the meta device and {type(holders[0][0]).__name__} has no reset_parameters '
                    f"to give it values: pass init_weights, a function of the module, or weights")

    def explained(self, error, entry):
        """What to raise on any rank when rank 0 has no value to write."""
        if self._weights is not None or id(entry.param) not in self._holders:
            return error
        holders = [module for module, _ in self._holders[id(entry.param)]]
        ways = [way for way in _WAYS if any(way in self._ways(module) for module in holders)]
        return InvalidArgument(
            f'param "{entry.name}" of a {type(holders[0]).__name__} has no first value: it was on the meta device, and '
            f"{', '.join(ways)} left it as it was on rank 0: pass init_weights, a function of the module that fills "
            f"it, or weights")

    def _ways(self, module):
        """{name: function} of what fills a module; each is for what those before it left without values."""
        reset = _reset if callable(getattr(module, "reset_parameters", None)) else None
        ways = zip(_WAYS, (self._given, self._init_of.get(module), reset))
        return {name: way for name, way in ways if way}

    def _check_names(self):
        names = {}
        for name, param in self._model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)  # one name of a tied param will do
        missing = [known[0] for known in names.values() if not any(name in self._weights for name in known)]
        buffers = dict(self._model.named_buffers())
        known = {name for of_one in names.values() for name in of_one}
        # Of a file of the engine's own (docs/checkpoint_format.md): what lies between the params.
        unexpected = [name for name in self._weights.keys()
                      if name not in known and name not in buffers and not name.startswith("__hdf5_")]
        if missing or unexpected:
            raise InvalidArgument(f"weights: missing {missing}, unexpected {unexpected}")

    def fill_buffers(self):
        """On every rank: buffers take the values that weights has for them."""
        for name, buffer in self._model.named_buffers() if self._weights is not None else ():
            if name in self._weights:
                with torch.no_grad():
                    buffer.copy_(self._weights[name])

    def of(self, unit, entries):
        """{entry: tensor} of the entries a unit owns, without those that nothing fills; on rank 0, a unit at a time."""
        if self._weights is not None:
            names = {id(p): name for name, p in self._model.named_parameters(remove_duplicate=False)
                     if name in self._weights}
            return {entry: self._weights[names[id(entry.param)]] for entry in entries}
        values = {entry: entry.param for entry in entries if not entry.param.is_meta}
        for way in _WAYS:
            for modules in (self._inside, self._elsewhere):
                left = [entry for entry in entries if entry not in values]
                if left:
                    values |= self._filled(left, way, modules(unit, left))
        return values

    def _inside(self, unit, entries):
        """Modules of the unit that hold one of them or are around one; those around, and the first of several, last."""
        found = {}
        holders = {module for entry in entries for module, _ in self._holders[id(entry.param)]}
        for module in reversed(list(unit.module.modules())):
            if module in holders or any(child in found for child in module.children()):
                found[module] = None
        return list(found)

    def _elsewhere(self, unit, entries):
        """Modules outside the unit that hold one of them, which is tied."""
        inside = set(unit.module.modules())
        return [module for entry in entries for module, _ in self._holders[id(entry.param)] if module not in inside]

    def _filled(self, entries, way, modules):
        """Values that modules give entries, in real params that take the places of theirs meanwhile."""
        fills = [(self._ways(module)[way], module) for module in modules if way in self._ways(module)]
        wanted, made = {id(entry.param) for entry in entries}, {}
        own = {inner: dict(inner._parameters) for _, module in fills for inner in module.modules()}
        try:
            for module, params in own.items():
                for name, param in params.items():
                    if param is not None:
                        if id(param) not in made:
                            made[id(param)] = _stand_in(param, "cpu" if id(param) in wanted else "meta")
                        module._parameters[name] = made[id(param)]
            with torch.no_grad():
                for fill, module in fills:
                    fill(module)
                return {entry: value for entry in entries if (value := self._value(entry)) is not None}
        finally:
            for module, params in own.items():
                module._parameters.update(params)

    def _value(self, entry):
        for module, name in self._holders[id(entry.param)]:
            value = module._parameters[name]
            if value is not None and not value.is_meta and not (value.sum().isnan() and value.isnan().any()):
                return value.detach()
        return None


def _reset(module):
    module.reset_parameters()


def _stand_in(param, device):
    return nn.Parameter(torch.full(param.shape, math.nan, dtype=param.dtype, device=device), param.requires_grad)


def _open(weights):
    """weights as a mapping of names to tensors, or None."""
    if weights is None:
        return None
    if not isinstance(weights, (str, os.PathLike)):
        return weights
    path = pathlib.Path(weights)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise NotFound(f"weights: there is no safetensors file at {path}")
    return _SafeTensors(files)


class _SafeTensors:
    """Tensors of safetensors files by name, each read when it is asked for."""

    def __init__(self, files):
        from safetensors import safe_open  # of PyPI, as transformers brings it; needed here only

        self._files = [safe_open(file, framework="pt") for file in files]
        self._file_of = {name: file for file in self._files for name in file.keys()}

    def keys(self):
        return self._file_of.keys()

    def __contains__(self, name):
        return name in self._file_of

    def __getitem__(self, name):
        return self._file_of[name].get_tensor(name)
