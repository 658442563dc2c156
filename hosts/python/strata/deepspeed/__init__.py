"""For programs written against DeepSpeed: initialize() takes its configuration and returns what DeepSpeed's returns.

    import strata.deepspeed as deepspeed
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config="ds_config.json")
    for batch in batches:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

config.py reads the configuration and says for every key what becomes of it; engine.report has the lines.
"""
import torch

from ..errors import InvalidArgument
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
    inner = prepare(model, text=manifest.text, groups=groups, **prepare_options)
    facade = Optimizer(inner)
    scheduler = lr_scheduler(facade) if callable(lr_scheduler) else lr_scheduler
    return DeepSpeedEngine(inner, facade, scheduler, manifest), facade, None, scheduler


def _groups(model_parameters):
    given = list(model_parameters or [])
    if given and isinstance(given[0], dict):
        keys = ("params", "lr", "betas", "eps", "weight_decay")
        return [{key: group[key] for key in keys if key in group} for group in given]
    return None  # all params have the configuration's settings; frozen ones are known by requires_grad


class Optimizer(torch.optim.Optimizer):
    """What learning-rate schedulers hold: param_groups whose "lr" the next step takes. The update is the engine's."""

    def __init__(self, engine):
        default = float(engine.core.setting("optimizer.params.lr"))
        self._engine = engine
        # torch wants a tensor in every group; the model's own params have no gradients it could see.
        super().__init__([{"params": [torch.zeros(1, requires_grad=True)],
                           "lr": default if group["lr"] is None else group["lr"]} for group in engine.param_groups],
                         {"lr": default})

    def step(self, closure=None):
        """Does nothing: DeepSpeed programs call engine.step()."""

    def zero_grad(self, set_to_none=True):
        """Does nothing: gradients are taken and dropped as they come."""

    def set_rates(self):
        for group, own in zip(self._engine.param_groups, self.param_groups):
            group["lr"] = own["lr"]


class DeepSpeedEngine(torch.nn.Module):
    """The model with DeepSpeed's calls. `strata` is the strata.torch.Engine; `report` says what became of each key."""

    def __init__(self, inner, optimizer, scheduler, manifest):
        super().__init__()
        self.module = inner.model
        self.__dict__.update(strata=inner, optimizer=optimizer, lr_scheduler=scheduler, report=manifest.report())
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
        if not self.is_gradient_accumulation_boundary():
            return
        self.optimizer.set_rates()
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
        """Does nothing."""

    def save_checkpoint(self, save_dir, tag=None, client_state=None):
        """Collective. client_state: texts by name, which travel with the checkpoint."""
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
        """Collective; every rank writes its part of the one file."""
        self.strata.core.export_weights(f"{save_dir}/{save_filename}")
        return True

    def close(self):
        self.strata.close()
