"""deepspeed.zero: models built without memory, and whole params of a running engine."""
import contextlib
import types
import weakref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import FailedPrecondition, InvalidArgument
from ..torch import init
from .alternatives import OF_ZERO, absent

_engine_of = WeakIdKeyDictionary()  # param: the strata.torch.Engine that has it, as a weak reference


def Init(module=None, data_parallel_group=None, mem_efficient_linear=True, remote_device=None, pin_memory=False,
         config_dict_or_path=None, config=None, enabled=True, dtype=None, mpu=None):
    """strata.torch.init(): `with Init(): model = ...` makes params that get their memory, and values, in initialize.

    Where they lie and how they are sharded is the configuration's of initialize: mem_efficient_linear, remote_device,
    pin_memory and both configs change nothing here.
    """
    given = {"module": module, "data_parallel_group": data_parallel_group, "dtype": dtype, "mpu": mpu}
    why = {"module": "initialize shards a model that is there",
           "dtype": "bf16.enabled in the configuration makes float32 params bfloat16",
           "data_parallel_group": "the groups are those of tensor_model_parallel_size and pipeline_model_parallel_size",
           "mpu": "the groups are those of tensor_model_parallel_size and pipeline_model_parallel_size"}
    for name, value in given.items():
        if value is not None:
            raise InvalidArgument(f"zero.Init({name}=...): {why[name]}; leave the argument out")
    return init() if enabled else contextlib.nullcontext()


@contextlib.contextmanager
def GatheredParameters(params, modifier_rank=None, fwd_module=None, enabled=True):
    """`with GatheredParameters(params):` they are whole and can be read. Collective.

    Params of no engine are left alone; fwd_module changes nothing. Read only: with a modifier_rank it is
    refused, engine.strata.write(param, value, root=rank) sets one.
    """
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    by_engine = {}
    for param in params if enabled else ():
        engine = _engine_of[param]() if param in _engine_of else None
        if engine is not None:
            by_engine.setdefault(engine, []).append(param)
        elif param.is_meta:
            raise FailedPrecondition("zero.GatheredParameters: a param of zero.Init has no values before initialize: "
                                     "pass initialize(init_weights=function of a module), or weights=")
    if by_engine and modifier_rank is not None:
        raise FailedPrecondition(
            f"zero.GatheredParameters(modifier_rank={modifier_rank}): params cannot be written in place; "
            f"engine.strata.write(param, value, root={modifier_rank}) sets one, modifier_rank=None reads them")
    with contextlib.ExitStack() as gathered:
        for engine, own in by_engine.items():
            gathered.enter_context(engine.gathered(types.SimpleNamespace(parameters=lambda own=own: own)))
        yield


def adopt(engine):
    """From now on the engine's params are found by GatheredParameters."""
    for param in engine.model.parameters():
        _engine_of[param] = weakref.ref(engine)


def __getattr__(name):
    raise absent("strata.deepspeed.zero", name, OF_ZERO)
