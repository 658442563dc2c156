"""torch.autocast must not copy weights: what autograd saves of a copy in another dtype stays whole, on every rank.

Where it is on when a unit is called, its dtype tells. Inside the unit's forward, where it may be turned on, the tensors
that autograd saves tell: one whose graph is views and casts, down to a weight, is a copy of that weight.
"""
import torch
from torch import nn

from ..errors import FailedPrecondition

_HALVES = (torch.bfloat16, torch.float16)
_CAST = "ToCopyBackward"
_COPY_OF_ONE = frozenset([_CAST] + [f"{view}Backward" for view in (
    "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "Slice", "Select", "Split", "Unsqueeze",
    "Squeeze", "Expand")])


def targets(unit):
    """{dtype: name of a param} of what torch.autocast copies: params of matrix products and convolutions."""
    embeddings = {id(p) for module in unit.module.modules() if isinstance(module, nn.Embedding)
                  for p in module.parameters(recurse=False)}
    found = {}
    for entry in unit.entries:
        if _is_matrix(entry) and id(entry.param) not in embeddings:
            found.setdefault(entry.dtype, entry.name)
    return found


def check_call(unit, device_type):
    """Refuses a unit that is called under an autocast that would copy its weights."""
    if not torch.is_autocast_enabled(device_type):
        return
    to = torch.get_autocast_dtype(device_type)
    for dtype, name in unit.autocast.items():
        if dtype != to:
            raise _refusal(f'unit "{unit.name}" is called under torch.autocast', name, dtype, to)


def check_saved(tensor, weights):
    """Refuses to save a 16-bit copy of an attached weight. A frozen weight's copy has no graph, and is not seen."""
    if tensor.dtype not in _HALVES:
        return
    node, is_cast = tensor.grad_fn, False
    while node is not None:
        name = node.name().rstrip("0123456789")
        if name not in _COPY_OF_ONE:
            break
        is_cast = is_cast or name == _CAST
        node = node.next_functions[0][0]
    param = getattr(node, "variable", None) if is_cast else None
    entry = None if param is None else weights.entry_at(param)
    if entry and _is_matrix(entry):
        raise _refusal(f'unit "{entry.unit.name}" turns torch.autocast on in its forward, or casts itself,', entry.name,
                       entry.dtype, tensor.dtype)


def _is_matrix(entry):
    return len(entry.shape) >= 2


def _refusal(what, name, dtype, to):
    dtype, to = str(dtype).removeprefix("torch."), str(to).removeprefix("torch.")
    return FailedPrecondition(
        f'{what} with param "{name}" in {dtype}: a {to} copy of it would be saved for backward on every rank, which '
        f"defeats sharding; prepare {to} weights (bf16.enabled = true makes them bfloat16), the engine keeps the fp32 "
        f"master")
