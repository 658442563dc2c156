"""The optimizer a loop holds: a torch AdamW whose param groups the engine takes over, and whose step is the engine's.

Schedulers made for the torch optimizer go on changing its groups; every step takes their settings from there.
"""
import torch
from accelerate.optimizer import AcceleratedOptimizer

from ..errors import FailedPrecondition, InvalidArgument
from ..model import SETTINGS
from ..torch.optimizers import idle_step

_KINDS = {torch.optim.AdamW: "AdamW", torch.optim.Adam: "Adam"}
_OFF = ("amsgrad", "maximize", "differentiable")


class Optimizer(AcceleratedOptimizer):
    """`optimizer` is the torch optimizer; `step` steps when the accelerator says that gradients are complete."""

    def __init__(self, optimizer, accelerator):
        super().__init__(optimizer, device_placement=False)
        self._accelerator = accelerator

    def step(self, closure=None):
        if closure is not None:
            raise InvalidArgument("optimizer.step(closure): AdamW needs none; leave it out")
        if self.gradient_state.sync_gradients:
            self._accelerator._step([_current(group) for group in self.param_groups])
            with idle_step(self.optimizer):
                self.optimizer.step()

    def zero_grad(self, set_to_none=None):
        """strata.torch's zero_grad where torch's would be: with a step's last micro-batch, or after one that raised."""
        engine = self._accelerator.engine
        if engine is not None and (self.gradient_state.sync_gradients or engine.is_broken):
            engine.zero_grad()

    def add_param_group(self, param_group):
        raise FailedPrecondition("optimizer.add_param_group after prepare: the engine has the params it was prepared "
                                 "with; make all groups before, with lr = 0 for what is to be trained later")

    @property
    def step_was_skipped(self):
        """Whether the last step was, because the gradient was not finite."""
        return not self._accelerator.engine.core.info().was_applied


def kind(optimizer):
    """The manifest's optimizer.type; InvalidArgument for what is not the update that the engine computes."""
    found = _KINDS.get(type(optimizer))
    if found is None:
        raise InvalidArgument(f"prepare: {type(optimizer).__module__}.{type(optimizer).__name__} is not an optimizer "
                              f"that the engine has; use torch.optim.AdamW or torch.optim.Adam")
    for group in optimizer.param_groups:
        _check_off(group, "prepare")
    if optimizer.state:
        raise InvalidArgument("prepare: the optimizer has made steps already, its state would be lost; prepare it "
                              "before the first step")
    return found


def settings(optimizer):
    """{name: [its values in the groups]} of what a configuration may say too."""
    return {name: [_initial(group, name) for group in optimizer.param_groups] for name in SETTINGS}


def groups(optimizer, model):
    """The param groups as strata.torch.prepare takes them; every trainable param must be in one."""
    kind(optimizer)
    given = {id(param) for group in optimizer.param_groups for param in group["params"]}
    left = [name for name, param in model.named_parameters() if param.requires_grad and id(param) not in given]
    if left:
        raise InvalidArgument(f"prepare: the optimizer does not have {len(left)} of the model's trainable params "
                              f"({', '.join(left[:3])}, ...): set requires_grad = False on what is not to be trained")
    return [{"params": group["params"], **{name: _initial(group, name) for name in SETTINGS}}
            for group in optimizer.param_groups]


def _check_off(group, what):
    for name in _OFF:
        if group.get(name):
            raise InvalidArgument(f"{what}: {name}=True in a param group: the engine's update does not have it")


def _current(group):
    """A group's settings for the step to come."""
    _check_off(group, "optimizer.step")
    return {name: _plain(group[name]) for name in SETTINGS}


def _initial(group, name):
    """A group's setting before any scheduler changed it."""
    return _plain(group.get("initial_" + name, group[name]))


def _plain(value):
    """Numbers as JSON and TOML have them."""
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return float(value)
