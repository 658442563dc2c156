"""torch's own optimizers on a prepared model: they find no gradients, and would do nothing without a word.

The check is a hook of torch's, before every step of every optimizer of the process; one that holds no param of a
prepared model passes.
"""
import contextlib

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import FailedPrecondition
from .released import ReleasedParameter

_IDLE = "_strata_idle_step"  # attribute of an optimizer while idle_step runs


@contextlib.contextmanager
def idle_step(optimizer):
    """Around a step that is to do nothing: schedulers count the steps of the optimizer they were made for."""
    setattr(optimizer, _IDLE, True)
    try:
        yield
    finally:
        delattr(optimizer, _IDLE)


def _refuse(optimizer, *_):
    if hasattr(optimizer, _IDLE):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if isinstance(param, ReleasedParameter):
                raise FailedPrecondition(
                    f"{type(optimizer).__name__}.step: it holds {type(param).origin} of a prepared model, whose "
                    f"gradients go to the engine: it would do nothing. Call engine.step(), or the optimizer that "
                    f"prepare returned")


register_optimizer_step_pre_hook(_refuse)
