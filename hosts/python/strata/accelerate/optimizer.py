"""The optimizer a loop holds: a torch AdamW whose param groups the engine takes over, and whose step is the engine's.

Schedulers made for the torch optimizer go on changing its groups; every step takes the learning rates from there.
"""
import torch
from accelerate.optimizer import AcceleratedOptimizer

from ..errors import InvalidArgument

_KINDS = {torch.optim.AdamW: "AdamW", torch.optim.Adam: "Adam"}
_SETTINGS = ("lr", "betas", "eps", "weight_decay")
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
            self._accelerator._step([group["lr"] for group in self.param_groups])
            self.optimizer.step()  # finds no gradients; schedulers count it

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
        for name in _OFF:
            if group.get(name):
                raise InvalidArgument(f"prepare: {found}({name}=True) is not there")
    if optimizer.state:
        raise InvalidArgument("prepare: the optimizer has made steps already, its state would be lost; prepare it "
                              "before the first step")
    return found


def settings(optimizer):
    """{name: [its values in the groups]} of what a configuration may say too."""
    return {name: [_initial(group, name) for group in optimizer.param_groups] for name in _SETTINGS}


def groups(optimizer, model):
    """The param groups as strata.torch.prepare takes them; every trainable param must be in one."""
    kind(optimizer)
    given = {id(param) for group in optimizer.param_groups for param in group["params"]}
    left = [name for name, param in model.named_parameters() if param.requires_grad and id(param) not in given]
    if left:
        raise InvalidArgument(f"prepare: the optimizer does not have {len(left)} of the model's trainable params "
                              f"({', '.join(left[:3])}, ...): set requires_grad = False on what is not to be trained")
    return [{"params": group["params"], **{name: _initial(group, name) for name in _SETTINGS}}
            for group in optimizer.param_groups]


def _initial(group, name):
    """A group's setting before any scheduler changed it."""
    return _plain(group.get("initial_" + name, group[name]))


def _plain(value):
    """Numbers as JSON and TOML have them."""
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return float(value)
