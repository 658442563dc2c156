"""Tensors over the engine's memory, the engine's structs over torch's tensors, and the stream work goes to.

The only file that knows where memory lies: on the CPU a tensor is made by torch.frombuffer, on a CUDA device by
__cuda_array_interface__; no bytes are copied either way. How many tensors share such a tensor's storage says whether
any of them still reads the memory: views, detached aliases, and what autograd saved.
"""
import ctypes
import math

import torch

from .. import _abi
from ..arrays import shape_of
from ..errors import InvalidArgument

CUDA = 2  # STRATA_CUDA
_LEGACY_STREAM = 1  # CU_STREAM_LEGACY; torch calls it 0
DTYPES = {torch.float32: ("fp32", _abi.F32), torch.bfloat16: ("bf16", _abi.BF16), torch.float16: ("fp16", _abi.F16)}


class _CudaMemory:
    """What torch.as_tensor asks a foreign CUDA pointer for."""

    def __init__(self, address, nbytes):
        self.__cuda_array_interface__ = {"version": 2, "data": (address, False), "shape": (nbytes,), "typestr": "|u1"}


def device_of(struct):
    """torch.device of a strata_tensor."""
    return torch.device("cuda", struct.device_id) if struct.device_type == CUDA else torch.device("cpu")


class Lender:
    """Memory for gradients out of torch's own allocator (strata_lender): activations use it when there are none."""

    def __init__(self):
        self.struct = _abi.strata_lender(lend=_abi.LendFn(self._lend), take_back=_abi.TakeBackFn(self._take_back))

    @staticmethod
    def _lend(_, nbytes, stream):
        device = torch.cuda.current_device()
        if not stream:  # for work anywhere: what this stream did with the memory before must be over
            torch.cuda.current_stream(device).synchronize()
            return torch.cuda.caching_allocator_alloc(nbytes, device)
        native = stream.contents.native
        return torch.cuda.caching_allocator_alloc(nbytes, device, 0 if native == _LEGACY_STREAM else native)

    @staticmethod
    def _take_back(_, address, stream):
        torch.cuda.caching_allocator_delete(address)


class Place:
    """A param's memory at one address, and the tensors over it, made once: a unit is fetched to the same places again
    and again. Not for params without elements.
    """

    def __init__(self, struct, shape, dtype):
        with torch.inference_mode(False):  # its tensors are of a kind that a param cannot take
            nbytes = math.prod(shape) * dtype.itemsize
            if struct.device_type == CUDA:
                buffer = _CudaMemory(struct.data, nbytes)
                self._flat = torch.as_tensor(buffer, device=device_of(struct)).view(dtype)
            else:
                self._flat = torch.frombuffer((ctypes.c_char * nbytes).from_address(struct.data), dtype=dtype)
            self.tensor = self._flat.view(shape)
        self._views = {}       # by what they are
        self._storage = self._flat.untyped_storage()
        self._cdata = self._storage._cdata
        self._own = self._uses()

    def _uses(self):
        return torch._C._storage_Use_Count(self._cdata)

    def is_read(self, shared):
        """Whether tensors other than ours, and than `shared` that are known of, are over the memory."""
        return self._uses() > self._own + shared

    def view(self, dtype, size, stride, offset):
        """A new tensor over a part of the memory."""
        key = dtype, size, stride, offset
        view = self._views.get(key)
        if view is None:
            flat = self._flat if self._flat.dtype == dtype else self._flat.view(dtype)
            view = self._views[key] = flat.as_strided(size, stride, offset)
            self._own = self._own + 1
        return view.detach()


class Description:
    """A strata_tensor over one torch tensor after another, all of one shape; `what` names them in errors."""

    def __init__(self, shape, what):
        self._what = what
        self.struct = _abi.strata_tensor(ndim=len(shape), shape=shape_of(shape))
        self.pointer = ctypes.byref(self.struct)

    def set(self, tensor):
        """Describes a tensor; returns it, made contiguous if it is not: it must live while the engine may read it."""
        if tensor.layout is not torch.strided:
            raise InvalidArgument(f"{self._what}: a {tensor.layout} tensor; the engine takes dense ones (Embedding "
                                  f"with sparse=False)")
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise InvalidArgument(f"{self._what}: {tensor.dtype}; the engine takes float32, bfloat16 and float16")
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        struct = self.struct
        struct.data, struct.dtype = tensor.data_ptr(), dtype[1]
        struct.device_type, struct.device_id = (CUDA, tensor.get_device()) if tensor.is_cuda else (_abi.CPU, 0)
        return tensor


def stream_source(device):
    """A function that returns a pointer to the stream torch uses now on a device; on the CPU it returns None."""
    if device.type != "cuda":
        return lambda: None
    known = {}  # by torch's number, a struct each

    def current():
        native = torch._C._cuda_getCurrentRawStream(device.index)
        if native not in known:
            # The engine takes the legacy default stream by the name CU_STREAM_LEGACY, torch calls it 0.
            stream = _abi.strata_stream(domain=CUDA, device_id=device.index, native=native or _LEGACY_STREAM)
            known[native] = ctypes.byref(stream)
        return known[native]

    return current
