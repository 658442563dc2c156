"""Tensors over the engine's memory, the engine's structs over torch's tensors, and the stream work goes to.

The only file that knows where memory lies: on the CPU a tensor is made by torch.frombuffer, on a CUDA device by
__cuda_array_interface__; no bytes are copied either way. The storage of such a tensor keeps a buffer object alive, and
the death of that object says that no tensor reads the memory any more: neither views, nor what autograd saved.
"""
import ctypes
import weakref

import torch

from .. import _abi
from ..arrays import shape_of
from ..errors import InvalidArgument

CUDA = 2  # STRATA_CUDA
DTYPES = {torch.float32: ("fp32", _abi.F32), torch.bfloat16: ("bf16", _abi.BF16), torch.float16: ("fp16", _abi.F16)}


class _CudaMemory:
    """What torch.as_tensor asks a foreign CUDA pointer for."""

    def __init__(self, address, nbytes):
        self.__cuda_array_interface__ = {"version": 2, "data": (address, False), "shape": (nbytes,), "typestr": "|u1"}


def device_of(struct):
    """torch.device of a strata_tensor."""
    return torch.device("cuda", struct.device_id) if struct.device_type == CUDA else torch.device("cpu")


def tensor_at(struct, elements, dtype, freed):
    """A flat tensor over the memory of a strata_tensor, and a weak reference that calls `freed` when nothing uses it.

    Not for tensors without elements: those have no memory.
    """
    if torch.is_inference_mode_enabled():  # its tensors are of a kind that a param cannot take
        with torch.inference_mode(False):
            return tensor_at(struct, elements, dtype, freed)
    if struct.device_type == CUDA:
        buffer = _CudaMemory(struct.data, elements * dtype.itemsize)
        tensor = torch.as_tensor(buffer, device=device_of(struct)).view(dtype)
    else:
        buffer = (ctypes.c_char * (elements * dtype.itemsize)).from_address(struct.data)
        tensor = torch.frombuffer(buffer, dtype=dtype)
    return tensor, weakref.ref(buffer, freed)


def struct_of(tensor, what):
    """(struct, tensor): a strata_tensor over a torch tensor, which is made contiguous if it is not.

    The second must live as long as the engine may read the first.
    """
    if tensor.layout is not torch.strided:
        raise InvalidArgument(f"{what}: a {tensor.layout} tensor; the engine takes dense ones (Embedding with "
                              f"sparse=False)")
    if tensor.dtype not in DTYPES:
        raise InvalidArgument(f"{what}: {tensor.dtype}; the engine takes float32, bfloat16 and float16")
    tensor = tensor.detach().contiguous()
    is_cuda = tensor.device.type == "cuda"
    return _abi.strata_tensor(data=tensor.data_ptr(), device_type=CUDA if is_cuda else _abi.CPU,
                              device_id=tensor.device.index or 0, dtype=DTYPES[tensor.dtype][1], ndim=tensor.dim(),
                              shape=shape_of(tensor.shape)), tensor


def stream_of(device):
    """A pointer to the stream that torch uses now on a device, for calls of the engine; None on the CPU."""
    if device.type != "cuda":
        return None
    # The engine takes the legacy default stream by the name CU_STREAM_LEGACY, torch calls it 0.
    native = torch.cuda.current_stream(device).cuda_stream or 1
    return ctypes.byref(_abi.strata_stream(domain=CUDA, device_id=device.index or 0, native=native))
