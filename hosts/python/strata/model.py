"""What is registered with an engine: groups, units and params. Made by Engine and Unit, never by hand.

They keep their engine alive; the engine does not know them. All are used under the engine's rule: one thread at a time.
"""
import ctypes
import math

import numpy as np

from . import _abi, arrays
from .errors import InvalidArgument, did_you_mean

SETTINGS = ("lr", "betas", "eps", "weight_decay")  # of a param group


def c_text(text, what):
    """UTF-8 for a char pointer, which would end at the first NUL."""
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a str, not {type(text).__name__}")
    if "\0" in text:
        raise InvalidArgument(f"{what} contains a NUL character")
    return text.encode()


def given(value, what):
    """A number for a field where NaN means "not given": None becomes that NaN, and a NaN of the caller's is refused."""
    if value is None:
        return math.nan
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{what} must be a number, not {value!r}")
    if math.isnan(value):
        raise InvalidArgument(f"{what} is NaN")
    return float(value)


def group_args(settings, what):
    """strata_group_args of a dict of SETTINGS; what is None, or not there, is not given."""
    for key in settings:
        if key not in SETTINGS:
            raise InvalidArgument(f"{what}: there is no setting {key!r}{did_you_mean(str(key), SETTINGS)} (settings of "
                                  f"a group: {', '.join(SETTINGS)})")
    betas = settings.get("betas")
    betas = (None, None) if betas is None else tuple(betas)
    if len(betas) != 2:
        raise InvalidArgument(f"{what}: betas are two numbers, not {len(betas)}")
    values = {name: settings.get(name) for name in SETTINGS if name != "betas"} | dict(zip(("beta1", "beta2"), betas))
    return _abi.strata_group_args(**{name: given(value, f"{what}: {name}") for name, value in values.items()})


class Group:
    """Params with their own optimizer settings. Group 0, the manifest's [optimizer.params], needs no object."""

    def __init__(self, engine, **settings):
        args = group_args(settings, "a param group")
        number = _abi.Group()
        engine._call("strata_add_group", ctypes.byref(args), ctypes.byref(number))
        self.engine = engine
        self.number = number.value


class Unit:
    """Params that are fetched together, usually one layer."""

    def __init__(self, engine, name):
        number = _abi.Unit()
        engine._call("strata_add_unit", c_text(name, "a unit's name"), ctypes.byref(number))
        self.engine, self.name, self.number = engine, name, number.value
        self._fetched = 0       # fetches, of this unit or of one tied to it, that were not released
        self._fetch_number = 0  # which stretch of being fetched this is: views belong to one
        self._brings = {self}   # units whose weights a fetch of this one makes readable

    def param(self, name, shape, dtype="fp32", group=None, frozen=False, tied_to=None, tensor_model_parallel=False,
              shared=False):
        """Registers a param; before commit.

        shape is a tuple of sizes, () a scalar; 0 is a size. dtype is "fp32", "bf16" or "fp16". A frozen param has no
        gradient and no optimizer state. tied_to is another Param of the same shape and dtype whose storage this name
        shares: gradients of both names add up, and fetching this unit makes the other's readable, too.

        Under model parallelism, for the norm: tensor_model_parallel says that this is the rank's part of a param split
        over the tensor-parallel ranks, else it is the same on all; shared, that another pipeline stage counts it.
        """
        return Param(self, name, shape, dtype, group, frozen, tied_to, tensor_model_parallel, shared)

    def grads_done(self):
        """This rank adds no more gradients to the unit in this micro-batch: reduce it when its turn comes.

        Optional: end_backward does it for the units left. Calling it early lets the reduction run under the backward.
        """
        self.engine._call("strata_grads_done", self.number)

    def _is_fetched(self, fetch_number):
        return self._fetched > 0 and self._fetch_number == fetch_number and not self.engine.closed


class Param:
    """A named tensor. `shape` and `dtype` are as registered."""

    def __init__(self, unit, name, shape, dtype, group, frozen, tied_to, tensor_model_parallel=False, shared=False):
        if group and group.engine is not unit.engine:
            raise InvalidArgument(f'param "{name}": its group belongs to another engine')
        if tied_to is not None and tied_to.unit.engine is not unit.engine:
            raise InvalidArgument(f'param "{name}": what it is tied to, "{tied_to.name}", belongs to another engine')
        dims = arrays.shape_of(shape)
        flags = (_abi.PARAM_FROZEN * bool(frozen) | _abi.PARAM_SHARED * bool(shared) |
                 _abi.PARAM_TENSOR_MODEL_PARALLEL * bool(tensor_model_parallel))
        args = _abi.strata_param_args(name=c_text(name, "a param's name"), shape=dims, ndim=len(dims),
                                      dtype=arrays.dtype_code(dtype), group=group.number if group else 0,
                                      flags=flags, tied=tied_to is not None,
                                      tied_to=tied_to.number if tied_to is not None else 0)
        number = _abi.Param()
        unit.engine._call("strata_add_param", unit.number, ctypes.byref(args), ctypes.byref(number))
        self.unit, self.name, self.number = unit, name, number.value
        self.shape, self.dtype = tuple(dims), dtype
        self._home = tied_to._home if tied_to is not None else unit  # the unit that holds the storage
        unit._brings.add(self._home)

    def write(self, value, root=0):
        """Sets the param, on all ranks, to (data-parallel) rank `root`'s array: float32 or its dtype. Collective.

        The weight and the optimizer's fp32 master are set, a float32 value at full precision; moments stay. Ranks other
        than root may pass None. Joins a running update; refused while a unit is fetched or micro-batches are in.
        """
        tensor = None
        if value is not None:
            struct, value = arrays.tensor_of(value, f'param "{self.name}"')
            tensor = ctypes.byref(struct)
        self.unit.engine._call("strata_write_param", self.number, tensor, root)

    def read(self, array="weight", dtype="fp32"):
        """A new array with a whole array of the param, on every rank. Collective.

        "weight" in float32 or, with dtype=param.dtype, as it is stored; "master", "exp_avg", "exp_avg_sq" and "grad"
        (the reduced sum over ranks and micro-batches, unscaled) in float32. Joins a running update. NotFound when the
        param has no such array.
        """
        arrays.dtype_code(dtype)
        out = np.empty(self.shape, arrays.NUMPY_DTYPE[dtype])
        struct, out = arrays.tensor_of(out, f'param "{self.name}"')
        name = c_text(array, "the array's name")
        self.unit.engine._call("strata_read_param", self.number, name, ctypes.byref(struct))
        return out

    def view(self):
        """The fetched weight, without a copy, read-only, in the param's dtype (bf16: see arrays.py). See arrays.View.

        FailedPrecondition while the unit is not fetched.
        """
        tensor = _abi.strata_tensor()
        self.unit.engine._call("strata_param_view", self.number, ctypes.byref(tensor))
        return arrays.view_of(tensor, self._home, self.name)

    def float32(self):
        """The fetched weight as a new float32 array, the caller's own: what to compute with when weights are bf16."""
        return arrays.to_float32(self.view())

    def grad(self, value):
        """Adds a gradient of this micro-batch: an array of the param's shape, float32, float16 or bfloat16.

        Any number of times. It is read before the call returns, unless the manifest says contiguous_gradients = false:
        then it is kept alive here, and must not be changed, until end_backward.
        """
        struct, value = arrays.tensor_of(value, f'gradient of param "{self.name}"')
        self.unit.engine._call("strata_grad", self.number, ctypes.byref(struct), None)
        self.unit.engine._keep_gradient(value)
