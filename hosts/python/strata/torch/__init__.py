"""Strata for PyTorch: a model is trained without changing it.

    engine = strata.torch.prepare(model, "train.toml")
    for batch in batches:
        loss = model(batch)
        engine.backward(loss)
        engine.step()

prepare.py hands the params over; units.py decides what is fetched together; passes.py follows forward and backward;
weights.py fetches, attaches and releases; released.py is what a param is meanwhile; gradients.py takes the gradients;
groups.py is param_groups, optimizers.py keeps torch's own optimizers away; initial.py is where params get their first
values, state.py the whole model's state; compiled.py keeps torch.compile out of all that, autocast.py refuses copies of
weights; grad_norm.py is the norm of a step to come; memory.py alone knows pointers and streams. docs/pytorch.md
explains the rules.
"""
from . import version  # noqa: F401 first: an older torch lacks what the others import
from . import optimizers  # noqa: F401 registers its hook
from .engine import Engine
from .grad_norm import GradNorm
from .initial import init
from .prepare import prepare
from .released import ReleasedParameter

__all__ = ["Engine", "GradNorm", "ReleasedParameter", "init", "prepare"]
