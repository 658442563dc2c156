"""numpy arrays as the engine's tensors, and views of fetched weights as numpy arrays.

Dtypes are named as in manifests: "fp32", "bf16", "fp16". numpy has no bfloat16: a bf16 array is ml_dtypes.bfloat16
where that package is installed, else a dtype of one field that holds the bits and that numpy refuses to compute with
(uint16 would compute nonsense in silence): compute on to_float32(array). `bfloat16` is whichever of the two it is; bits
in uint16 become an array of it by bits.view(strata.bfloat16). float64 arrays are refused, not rounded behind the
caller's back.
"""
import ctypes
import math

import numpy as np

from . import _abi
from .errors import FailedPrecondition, InvalidArgument

try:
    from ml_dtypes import bfloat16
except ImportError:
    bfloat16 = np.dtype([("bf16", "<u2")])

NUMPY_DTYPE = {"fp32": np.dtype(np.float32), "bf16": np.dtype(bfloat16), "fp16": np.dtype(np.float16)}
CODE = {"fp32": _abi.F32, "bf16": _abi.BF16, "fp16": _abi.F16}
_CODE_OF_NUMPY = {np.dtype(np.float32): _abi.F32, np.dtype(np.float16): _abi.F16, np.dtype(bfloat16): _abi.BF16}


def dtype_code(name):
    """STRATA_F32, ... of a dtype's name."""
    if name not in CODE:
        raise InvalidArgument(f'dtype must be one of "fp32", "bf16", "fp16", not {name!r}')
    return CODE[name]


def to_float32(array):
    """A float32 copy; exact for bfloat16."""
    array = np.asarray(array)
    if array.dtype == bfloat16:
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def to_bfloat16(array):
    """bf16 of a float32 array, to nearest, ties to even; NaN becomes 0x7FC0."""
    array = np.asarray(array, np.float32)
    bits = array.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded).view(bfloat16)


def shape_of(dims):
    """int64[ndim] for a shape field; () is a scalar."""
    dims = tuple(dims)
    return (ctypes.c_int64 * len(dims))(*dims)


def tensor_of(array, what):
    """(struct, array): the array, made contiguous if it is not (then a copy), and the tensor that points into it.

    The second must live as long as the engine may read the first.
    """
    array = np.asarray(array, order="C")
    code = _CODE_OF_NUMPY.get(array.dtype)
    if code is None or not array.dtype.isnative:
        raise InvalidArgument(f"{what}: an array of {array.dtype}; pass float32, float16 or strata.bfloat16")
    return _abi.strata_tensor(data=array.__array_interface__["data"][0], device_type=_abi.CPU, dtype=code,
                              ndim=array.ndim, shape=shape_of(array.shape)), array


class Lease:
    """The right to read one param's fetched memory; it ends with the release."""

    def __init__(self, unit, name, address, nbytes):
        self._unit, self._name, self._fetch = unit, name, unit._fetch_number
        self._range = range(address, address + nbytes)

    def covers(self, address):
        return address in self._range

    def check(self):
        if not self._unit._is_fetched(self._fetch):
            raise FailedPrecondition(f'param "{self._name}": the view ended with the release of unit '
                                     f'"{self._unit.name}"')


class View(np.ndarray):
    """Weights of a fetched unit, read-only, without a copy. Using it, or a slice of it, after the release raises.

    Results of arithmetic are plain arrays and copies stay usable. np.asarray(view) and other routes around Python
    (memoryview, C extensions) give the bare memory: what they return must not be used after the release.
    """

    _lease = None

    def __array_finalize__(self, source):
        lease = getattr(source, "_lease", None)
        if lease is not None and lease.covers(self.__array_interface__["data"][0]):
            self._lease = lease

    def _check(self):
        if self._lease is not None:
            self._lease.check()

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        if out is not None:
            kwargs["out"] = tuple(_plain(x) for x in out)
        return getattr(ufunc, method)(*(_plain(x) for x in inputs), **kwargs)

    def __array_function__(self, function, types, args, kwargs):
        return function(*_plain(args), **_plain(kwargs))


def _plain(x):
    """x with every View in it, nested ones too, checked and made a bare array."""
    if isinstance(x, View):
        x._check()
        return x.view(np.ndarray)
    if type(x) in (list, tuple):
        return type(x)(_plain(item) for item in x)
    if type(x) is dict:
        return {key: _plain(value) for key, value in x.items()}
    return x


def _checked(name):
    method = getattr(np.ndarray, name)

    def call(self, *args, **kwargs):
        self._check()
        return method(self, *args, **kwargs)

    call.__name__ = name
    call.__doc__ = method.__doc__
    return call


# Every method that may read values; `view` is how they get at the bare array.
_SPECIAL = ("__getitem__", "__iter__", "__contains__", "__repr__", "__str__", "__format__", "__float__", "__int__",
            "__bool__", "__complex__", "__index__", "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__")
for _name in _SPECIAL + tuple(name for name in dir(np.ndarray) if name[0] != "_" and name != "view"):
    if callable(getattr(np.ndarray, _name)):
        setattr(View, _name, _checked(_name))


@property
def _flat(self):
    self._check()
    return np.ndarray.flat.__get__(self)


View.flat = _flat


class _Memory:
    """What numpy asks a foreign pointer for; read-only. Every array made from it keeps the lease, and so the engine."""

    def __init__(self, address, shape, typestr, lease):
        self.__array_interface__ = {"version": 3, "data": (address, True), "shape": shape, "typestr": typestr}
        self._lease = lease


def view_of(tensor, unit, name):
    """A View of what strata_param_view filled in."""
    if tensor.device_type != _abi.CPU:
        raise FailedPrecondition(f'param "{name}": its weights lie on a device with memory of its own, and numpy reads '
                                 f"the host's: param.read() brings them")
    dtype = np.dtype({_abi.F32: np.float32, _abi.BF16: np.uint16, _abi.F16: np.float16}[tensor.dtype])
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    lease = Lease(unit, name, tensor.data, math.prod(shape) * dtype.itemsize)
    array = np.asarray(_Memory(tensor.data, shape, dtype.str, lease))
    if tensor.dtype == _abi.BF16:
        array = array.view(bfloat16)
    view = array.view(View)
    view._lease = lease
    return view
