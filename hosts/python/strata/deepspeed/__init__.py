"""For programs written against DeepSpeed: initialize() takes its configuration and returns what DeepSpeed's returns.

    import strata.deepspeed as deepspeed
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config="ds_config.json")
    for batch in batches:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

config.py reads the configuration and says for every key what becomes of it; engine.report has the lines.
"""
import json

import torch

from ..errors import FailedPrecondition, InvalidArgument
from ..model import SETTINGS
from ..torch import prepare
from .config import Refused, hidden_size, read

__all__ = ["DeepSpeedEngine", "Optimizer", "Refused", "initialize", "read"]


def initialize(args=None, model=None, optimizer=None, model_parameters=None, training_data=None, lr_scheduler=None,
               config=None, auto=None, **prepare_options):
    """(engine, optimizer, None, lr_scheduler). Collective.

    config           a dict, or the path of a JSON file; args.deepspeed_config if None
    model_parameters params as torch optimizers take them; groups keep their lr, betas, eps and weight_decay
    lr_scheduler     a function of the optimizer that makes a torch scheduler; engine.step() steps it
    auto             values for keys that are "auto", by path; further options are strata.torch.prepare's

    Refused names every key that cannot be had. An optimizer object is refused: the configuration names it.
    """
    if optimizer is not None:
        raise InvalidArgument("initialize(optimizer=...): the optimizer is the configuration's, it runs where its "
                              "state lies; leave the argument out")
    if training_data is not None:
        raise InvalidArgument("initialize(training_data=...): no data loader is made; keep your own")
    config = config if config is not None else getattr(args, "deepspeed_config", None)
    if config is None:
        raise InvalidArgument("initialize needs config, or args.deepspeed_config")
    manifest = read(config, auto, hidden_size(model))
    groups = _groups(model_parameters)
    with manifest.named():
        inner = prepare(model, text=manifest.text, groups=groups, **prepare_options)
    facade = Optimizer(inner)
    scheduler = lr_scheduler(facade) if callable(lr_scheduler) else lr_scheduler
    return DeepSpeedEngine(inner, facade, scheduler, manifest), facade, None, scheduler


def _groups(model_parameters):
    given = list(model_parameters or [])
    if given and isinstance(given[0], dict):
        return [{key: group[key] for key in ("params", *SETTINGS) if key in group} for group in given]
    return None  # all params have the configuration's settings; frozen ones are known by requires_grad


class Optimizer(torch.optim.Optimizer):
    """What schedulers hold: param_groups whose settings the next step takes. The update is the engine's."""

    def __init__(self, engine):
        text = {name: engine.core.setting("optimizer.params." + name) for name in SETTINGS}
        default = {name: json.loads(f"[{value}]") for name, value in text.items()}
        default = {name: value if name == "betas" else value[0] for name, value in default.items()}
        self._engine = engine
        # torch wants a tensor in every group; the model's own params have no gradients it could see.
        super().__init__([{"params": [torch.zeros(1, requires_grad=True)],
                           **{name: value for name, value in group.items() if value is not None}}
                          for group in engine.param_groups], default)

    def step(self, closure=None):
        """Does nothing: DeepSpeed programs call engine.step()."""

    def zero_grad(self, set_to_none=True):
        """Does nothing: gradients are taken and dropped as they come."""

    def add_param_group(self, param_group):
        if len(self.param_groups) == len(self._engine.param_groups):
            raise FailedPrecondition("optimizer.add_param_group: the engine has the params it was prepared with; give "
                                     "all groups to initialize as model_parameters")
        super().add_param_group(param_group)

    def give_settings(self):
        """To the engine, for its next step."""
        for group, own in zip(self._engine.param_groups, self.param_groups):
            group.update({name: own[name] for name in SETTINGS})


class DeepSpeedEngine(torch.nn.Module):
    """The model with DeepSpeed's calls. `strata` is the strata.torch.Engine; `report` says what became of each key."""

    def __init__(self, inner, optimizer, scheduler, manifest):
        super().__init__()
        self.module = inner.model
        inner.dropped_by = "engine.drop_gradients()"
        self.__dict__.update(strata=inner, optimizer=optimizer, lr_scheduler=scheduler,
                             report=manifest.report(inner.device.type))
        self.global_steps, self.micro_steps = 0, 0
        self.global_rank, self.world_size = inner.rank, inner.world
        self.dp_world_size = inner.core.ranks.data_parallel_size

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def backward(self, loss, retain_graph=False):
        self.strata.backward(loss, retain_graph)
        self.micro_steps += 1
        return loss

    def step(self):
        """Steps at the boundary: after gradient_accumulation_steps backwards; does nothing before."""
        self.strata.check_whole("engine.step")
        if not self.is_gradient_accumulation_boundary():
            return
        self.optimizer.give_settings()
        self.strata.step()
        self.optimizer.step()  # counted by schedulers
        self.global_steps += 1
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def is_gradient_accumulation_boundary(self):
        return self.micro_steps > 0 and self.micro_steps % self.gradient_accumulation_steps() == 0

    def gradient_accumulation_steps(self):
        return int(self.strata.core.setting("gradient_accumulation_steps"))

    def train_micro_batch_size_per_gpu(self):
        return int(self.strata.core.setting("train_micro_batch_size_per_gpu"))

    def train_batch_size(self):
        return int(self.strata.core.setting("train_batch_size"))

    def zero_optimization_stage(self):
        return int(self.strata.core.setting("zero_optimization.stage"))

    def get_global_grad_norm(self):
        return self.strata.core.info().grad_norm

    def was_step_applied(self):
        return bool(self.strata.core.info().was_applied)

    def get_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def zero_grad(self, set_to_none=True):
        """drop_gradients after a backward that raised; else does nothing, as gradients are taken as they come."""
        if self.strata.is_broken:
            self.drop_gradients()

    def drop_gradients(self):
        """The gradients since the last step go; its next micro-batch is the first. Collective."""
        self.strata.zero_grad()
        self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()

    def save_checkpoint(self, save_dir, tag=None, client_state=None):
        """Collective. client_state: texts by name, which travel with the checkpoint. One of that tag is replaced."""
        for key, value in (client_state or {}).items():
            self.strata.core.meta[key] = str(value)
        self.strata.save(save_dir, tag or f"global_step{self.global_steps}")
        return True

    def load_checkpoint(self, load_dir, tag=None):
        """Collective. Strata's own checkpoints, of any world size and stage."""
        self.strata.load(load_dir, tag)
        self.global_steps = self.strata.core.info().steps
        return load_dir, {}

    def save_16bit_model(self, save_dir, save_filename="model.safetensors"):
        """Collective; every rank writes its part of the one file. One that is there is not replaced: AlreadyExists."""
        self.strata.core.export_weights(f"{save_dir}/{save_filename}")
        return True

    def close(self):
        self.strata.close()
