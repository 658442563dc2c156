"""A prepared model's state as a whole: initial values, state dicts, checkpoints.

Params are read and written through the engine, collectively. Buffers are the model's own and are left where they are;
rank 0's persistent ones travel with a checkpoint as a meta value, and so do the settings of engine.param_groups.
"""
import base64
import collections
import io
import json
import warnings

import torch

from ..errors import InvalidArgument
from . import memory

BUFFERS, GROUPS = "torch.buffers", "torch.param_groups"


def write(entry, value, root):
    """Sets an entry's param from rank `root`'s tensor."""
    pointer = None
    if value is not None:
        if tuple(value.shape) != tuple(entry.shape):
            raise InvalidArgument(f'param "{entry.name}": a value of shape {tuple(value.shape)}, the param has '
                                  f"{tuple(entry.shape)}")
        value = value.detach().cpu()
        if value.dtype not in (torch.float32, entry.dtype):
            value = value.float()
        described = memory.Description(entry.shape, f'param "{entry.name}"')
        value, pointer = described.set(value), described.pointer
    entry.core.unit.engine._call("strata_write_param", entry.core.number, pointer, root)


def _persistent_buffers(model):
    """{name: buffer} of those a state dict has."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _keys(model):
    """Params and persistent buffers by name, in the order of model.state_dict()."""
    params = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(_persistent_buffers(model))
    for prefix, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            raise InvalidArgument(f'module "{prefix}" ({type(module).__name__}) has extra state, which '
                                  f"engine.state_dict does not carry")
        for name in (*module._parameters, *module._buffers):
            key = f"{prefix}.{name}" if prefix else name
            if key in params:
                yield key, params[key]
            elif key in buffers:
                yield key, buffers[key]


def state_dict(engine, wanted):
    engine._weights.sweep()
    values, read = collections.OrderedDict(), {}
    for key, tensor in _keys(engine.model):
        if isinstance(tensor, torch.nn.Parameter):
            if id(tensor) not in read:
                value = engine.read(tensor)
                read[id(tensor)] = value if wanted else None
            value = read[id(tensor)]
        else:
            value = tensor.detach().clone()
        if wanted:
            values[key] = value
    return values


def load_state_dict(engine, values, strict):
    own = dict(_keys(engine.model))
    missing = [key for key in own if key not in values]
    unexpected = [key for key in values if key not in own]
    if strict and (missing or unexpected):
        raise InvalidArgument(f"engine.load_state_dict: missing {missing}, unexpected {unexpected}")
    for key, tensor in own.items():
        if key in values and tuple(values[key].shape) != tuple(tensor.shape):
            raise InvalidArgument(f'engine.load_state_dict: "{key}" has shape {tuple(values[key].shape)}, the model '
                                  f"{tuple(tensor.shape)}")
    written = set()
    for key, tensor in own.items():
        if key not in values:
            continue
        if not isinstance(tensor, torch.nn.Parameter):
            with torch.no_grad():
                tensor.copy_(values[key])
        elif id(tensor) not in written:
            written.add(id(tensor))
            write(engine._entry(tensor), values[key], root=0)
    return missing, unexpected


def save(engine, root, tag):
    out = io.BytesIO()
    torch.save({name: buffer.detach().cpu() for name, buffer in _persistent_buffers(engine.model)}, out)
    engine.core.meta[BUFFERS] = base64.b64encode(out.getvalue()).decode()
    engine.core.meta[GROUPS] = json.dumps([_plain(group) for group in engine.param_groups])
    engine.core.save(root, tag)


def _plain(group):
    """Numbers, which may be those of numpy or torch, as JSON has them."""
    numbers = {name: value for name, value in group.items() if value is not None}
    return {name: [float(v) for v in value] if name == "betas" else float(value) for name, value in numbers.items()}


def _load_groups(groups, text):
    """As a torch optimizer's load_state_dict does: the settings are those of the run that saved."""
    if text is None:
        return  # saved by another kind of host
    saved = json.loads(text)
    if len(saved) != len(groups):
        warnings.warn(f"engine.load: the checkpoint has {len(saved)} param_groups, {len(groups)} are here: their "
                      f"settings stay as they are", stacklevel=4)
        return
    for group, settings in zip(groups, saved):
        betas = settings.pop("betas", None)
        group.update(dict.fromkeys(group) | settings | {"betas": betas and tuple(betas)})


def load(engine, root, tag):
    engine.core.load(root, tag)
    _load_groups(engine.param_groups, engine.core.meta.get(GROUPS))
    own = dict(_persistent_buffers(engine.model))
    if BUFFERS not in engine.core.meta:
        return  # saved by another kind of host
    saved = torch.load(io.BytesIO(base64.b64decode(engine.core.meta[BUFFERS])), weights_only=True)
    if saved.keys() != own.keys():
        raise InvalidArgument(f"engine.load: the checkpoint has buffers {sorted(saved)}, the model {sorted(own)}")
    with torch.no_grad():
        for name, buffer in own.items():
            buffer.copy_(saved[name])
