"""What a parameter is while its unit is not fetched: the same object, of a class that lets nobody read it.

Its __class__ is one made for it alone, a subclass of torch.nn.Parameter whose __torch_function__ answers questions of
metadata (shape, dtype, device, grad, ...) and raises for everything else, with the names of the param and its unit.
Behind it lies one NaN with zero strides, of the logical shape: code that gets round the class, in C++ say, computes NaN
and is seen, where an empty storage would be a crash and a one-element stand-in a silent broadcast.
"""
import torch
from torch import nn

from ..errors import FailedPrecondition

_PROPERTIES = ("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "grad", "names",
               "is_cpu", "is_cuda", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn",
               "itemsize", "nbytes", "output_nr", "retains_grad", "_version", "_backward_hooks",
               "_post_accumulate_grad_hooks")
_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "is_floating_point",
            "is_complex", "has_names", "__len__", "register_hook", "register_post_accumulate_grad_hook")
_METADATA = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES if hasattr(torch.Tensor, name)] +
    [torch.Tensor.grad.__set__, torch.Tensor.grad.__delete__, torch.is_floating_point, torch.is_complex, torch.numel] +
    [getattr(torch.Tensor, name) for name in _METHODS])
_MOVES = frozenset(getattr(torch.Tensor, name) for name in (
    "to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16"))

_WRITES = frozenset([torch.Tensor.data.__set__, torch.Tensor.__setitem__])  # besides those that end in _


class ReleasedParameter(nn.Parameter):
    """Base of every param's released class; `origin` is what its messages call it.

    `revive` is asked before an access is refused: it may make the param an ordinary one again, and returns whether.
    """

    origin = "a released param"
    revive = staticmethod(lambda: False)

    @classmethod
    def refuse(cls, what):
        return FailedPrecondition(
            f"{what}: {cls.origin} is released, no rank has its values whole; they can be read inside the forward of "
            f"its unit's module, in `with engine.gathered(module)`, by engine.read(param) and engine.state_dict()")

    @classmethod
    def refuse_write(cls, what):
        return FailedPrecondition(
            f"{what}: {cls.origin} is released, it is written on all ranks alike: engine.write(param, value), or all "
            f"of them by engine.load_state_dict(values)")

    @classmethod
    def refuse_move(cls, what):
        return FailedPrecondition(
            f"{what}: {cls.origin} is the engine's since prepare, model.to() and its like cannot move or convert it: "
            f"it lies where the manifest's plugins.device says and has the dtype it was prepared with (bf16.enabled "
            f"makes float32 params bfloat16). Its values: engine.read(param)")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in _METADATA:
            return super().__torch_function__(function, types, args, kwargs or {})
        released = cls
        while released and released.revive():  # `a + released` calls the class of whichever comes first
            released = _first_released((args, kwargs))
        if released:
            raise released._refusal_of(function)(_called(function))
        return function(*args, **(kwargs or {}))

    @classmethod
    def _refusal_of(cls, function):
        if function in _MOVES:
            return cls.refuse_move
        return cls.refuse_write if _writes(function) else cls.refuse

    def __deepcopy__(self, memo):
        raise self.refuse("copy.deepcopy")

    def __reduce_ex__(self, protocol):
        raise self.refuse("pickle (torch.save)")

    def __format__(self, spec):
        return format(str(self), spec)

    def __repr__(self, **_):
        return f"<{self.origin}, released: shape {tuple(self.shape)}, {self.dtype}, {self.device}>"


def released_class(name, unit, revive):
    """The class of one param while it is released."""
    return type("ReleasedParameter", (ReleasedParameter,),
                {"origin": f'param "{name}" of unit "{unit}"', "revive": staticmethod(revive)})


def _first_released(value):
    """The class of the first released param among arguments, or None."""
    if isinstance(value, ReleasedParameter):
        return type(value)
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, (list, tuple)) or hasattr(value, "mapping"):
        return next(filter(None, map(_first_released, value)), None)
    return None


def _writes(function):
    if function in _WRITES:
        return True
    name = getattr(function, "__name__", "")
    return name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_", "share_memory_")


def _called(function):
    name = torch.overrides.resolve_name(function)
    if name is None:  # the getter or setter of a property
        owner = getattr(getattr(function, "__self__", None), "__name__", None)
        name = f"torch.Tensor.{owner}" if owner else getattr(function, "__name__", repr(function))
    return name
