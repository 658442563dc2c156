"""Strata: ZeRO-sharded training with offload, from Python. The program keeps its own forward and backward.

    with strata.Engine("train.toml") as engine:
        layer = engine.unit("layer0")
        w = layer.param("w", (64, 64), dtype="bf16")
        engine.commit()
        w.write(initial)
        for batch in batches:
            with engine.fetch(layer):
                y = batch @ w.float32()
            w.grad(gradient)
            engine.end_backward()
            engine.step(lr=1e-3)

engine.py is the engine, model.py units and params, arrays.py dtypes and views, ranks.py ranks as threads, errors.py
what is raised. Collective calls are made by all ranks in the same order; one thread at a time uses an engine.
"""
from . import errors
from ._library import library as _library
from .arrays import View, bfloat16, to_bfloat16, to_float32
from .engine import Counters, Engine, Fetch, PlanItem, Ranks, StepInfo
from .errors import *  # noqa: F403 one class per status code
from .model import Group, Param, Unit
from .ranks import ThreadRank, run_threads

__all__ = ["Counters", "Engine", "Fetch", "Group", "Param", "PlanItem", "Ranks", "StepInfo", "ThreadRank", "Unit",
           "View", "bfloat16", "run_threads", "to_bfloat16", "to_float32", "version"] + errors.__all__


def version():
    """The version of libstrata.so."""
    return _library().strata_version().decode()
