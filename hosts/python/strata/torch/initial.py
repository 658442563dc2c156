"""Where params get their first values: from the model as it is built, from its layers' own initialisation, from files.

    with strata.torch.init():
        model = Model()                       # params have shapes and no memory, buffers are real
    engine = strata.torch.prepare(model, "train.toml")

A model of that kind never exists whole: prepare goes through its units, makes one unit's params at a time on rank 0,
lets the layers fill them as they do when they are built, and hands them to the engine, which shards them.
"""
import contextlib
import os
import pathlib
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


class Initial:
    """First values of a model's params; `weights` and `init_weights` are prepare's."""

    def __init__(self, model, weights, init_weights):
        self._model = model
        self._weights = _open(weights)
        # What a Hugging Face model fills its layers with, which it does itself after it is built.
        self._init = init_weights or getattr(model, "_init_weights", None)

    def check(self):
        """Every param will have values; InvalidArgument names those that will not, and values that have no param."""
        if self._weights is not None:
            self._check_names()
            return
        for name, module in self._model.named_modules():
            for param_name, param in module.named_parameters(recurse=False):
                full = f"{name}.{param_name}" if name else param_name
                if param.is_meta and self._init is None and not _resets(module):
                    raise InvalidArgument(
                        f'param "{full}" is on the meta device and {type(module).__name__} has no reset_parameters to '
                        f"give it values: pass init_weights, a function of the module, or weights")

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
        """{entry: tensor} of the entries that a unit owns; called on rank 0, for one unit at a time."""
        if self._weights is not None:
            names = {id(p): name for name, p in self._model.named_parameters(remove_duplicate=False)
                     if name in self._weights}
            return {entry: self._weights[names[id(entry.param)]] for entry in entries}
        values = {entry: entry.param for entry in entries if not entry.param.is_meta}
        left = {id(entry.param): entry for entry in entries if entry not in values}
        for module in unit.module.modules() if left else ():
            names = {name: left.pop(id(param)) for name, param in module.named_parameters(recurse=False)
                     if id(param) in left}
            if names:
                values |= self._filled(module, names)
        return values

    def _filled(self, module, entries):
        """Values a module gives its own params {name: entry}, in real ones that take their place meanwhile."""
        own = dict(module._parameters)
        for name, param in own.items():
            if param is not None and param.is_meta:
                real = torch.empty(param.shape, dtype=param.dtype)
                module._parameters[name] = nn.Parameter(real, param.requires_grad)
        try:
            if self._init is not None:
                self._init(module)
            elif _resets(module):
                module.reset_parameters()
            return {entry: module._parameters[name].detach() for name, entry in entries.items()}
        finally:
            module._parameters.update(own)


def _resets(module):
    return callable(getattr(module, "reset_parameters", None))


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
