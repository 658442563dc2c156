"""What clip_grad_norm_ returns: the norm of a step to come, which is a number once that step was called."""
import operator

import torch

from ..errors import FailedPrecondition


class GradNorm:
    """A float in comparisons, arithmetic and formats, a tensor to torch's functions; none of that before the step.

    The first use waits for the step's norm, nothing waits earlier: str() before the step says what it is.
    """

    def __init__(self, engine):
        self._engine, self._step = engine, engine._passes.steps

    @property
    def _is_known(self):
        return self._engine._passes.steps == self._step + 1

    def __float__(self):
        if not self._is_known:
            raise FailedPrecondition("the gradient norm is known between its engine.step() and the next one")
        return self._engine.core.info().grad_norm

    item = __float__

    def __repr__(self):
        return repr(float(self)) if self._is_known else "<the gradient norm between its engine.step() and the next one>"

    def __format__(self, spec):
        return format(float(self), spec) if spec else str(self)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        def tensor(value):
            return torch.tensor(float(value)) if isinstance(value, GradNorm) else value

        args = [type(arg)(map(tensor, arg)) if type(arg) in (list, tuple) else tensor(arg) for arg in args]
        return function(*args, **{name: tensor(value) for name, value in (kwargs or {}).items()})


def _of_numbers(operation):
    return lambda *operands: operation(*(float(each) if isinstance(each, GradNorm) else each for each in operands))


def _reflected(operation):
    return lambda self, other: operation(other, float(self))


for _name in ("lt", "le", "gt", "ge", "eq", "ne", "add", "sub", "mul", "truediv", "pow", "neg", "abs"):
    setattr(GradNorm, f"__{_name}__", _of_numbers(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(GradNorm, f"__r{_name}__", _reflected(getattr(operator, _name)))
