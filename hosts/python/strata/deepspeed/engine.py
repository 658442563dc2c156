"""The engine that initialize() returns, with DeepSpeed's calls, and the optimizer that its schedulers hold."""
import json
import logging
import os

import torch

from ..errors import FailedPrecondition, InvalidArgument, NotFound
from ..model import SETTINGS
from . import checkpoints, comm
from .alternatives import OF_ENGINE, absent

_log = logging.getLogger("strata.deepspeed")


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

    def __init__(self, inner, optimizer, scheduler, manifest, config, thread_rank=None):
        super().__init__()
        self.module = inner.model
        inner.dropped_by = "engine.drop_gradients()"
        self.__dict__.update(strata=inner, optimizer=optimizer, lr_scheduler=scheduler, config=config,
                             report=manifest.report(inner.device.type))
        self.global_steps, self.micro_steps, self.global_samples = 0, 0, 0
        self.device, self.global_rank, self.world_size = inner.device, inner.rank, inner.world
        self._thread_rank = thread_rank
        self.dp_world_size = inner.core.ranks.data_parallel_size

    def __getattr__(self, name):
        """The model's own attributes, as with DeepSpeed; of what is not there the error says how else to do it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
        if hasattr(module, name):
            return getattr(module, name)
        raise absent("strata.deepspeed: the engine", name, OF_ENGINE)

    @property
    def local_rank(self):
        """Among the ranks of this machine, from the launcher; threads of a process are on one."""
        return comm.get_local_rank() if self._thread_rank is None else self._thread_rank.rank

    @property
    def skipped_steps(self):
        return self.strata.core.info().skipped_steps

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
        self.global_samples += self.train_batch_size()
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

    def zero_optimization(self):
        return self.zero_optimization_stage() > 0

    def bfloat16_enabled(self):
        return self.strata.core.setting("bf16.enabled") == "true"

    def fp16_enabled(self):
        return False

    def gradient_clipping(self):
        return float(self.strata.core.setting("gradient_clipping"))

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

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True,
                        exclude_frozen_parameters=False):
        """Collective. A checkpoint of that tag is replaced.

        client_state, rank 0's, travels with it: a dict of what JSON holds exactly. So does the state of lr_scheduler.
        """
        _refuse("save_checkpoint", (
            ("save_latest", save_latest, True, "`latest` always names the newest; load others by their tag"),
            ("exclude_frozen_parameters", exclude_frozen_parameters, False, "checkpoints have every param")))
        meta = self.strata.core.meta
        meta[checkpoints.CLIENT_STATE] = checkpoints.text_of(client_state)
        meta[checkpoints.SAMPLES] = str(self.global_samples)
        meta[checkpoints.SCHEDULE] = checkpoints.schedule_text(self.lr_scheduler, self.optimizer)
        self.strata.save(save_dir, f"global_step{self.global_steps}" if tag is None else str(tag))
        return True

    def load_checkpoint(self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True,
                        load_lr_scheduler_states=True, load_module_only=False, custom_load_fn=None):
        """(directory of the checkpoint, client_state). Collective. Strata's own, of any world size and stage.

        Where there is none at all and no tag is given, a warning and (None, {}); one that is not whole is an error.
        """
        weights = "for weights alone, engine.strata.state_dict() of one that loaded it is initialize(weights=...)"
        _refuse("load_checkpoint", (
            ("load_module_strict", load_module_strict, True, f"params are those of the model; {weights}"),
            ("load_optimizer_states", load_optimizer_states, True, f"a checkpoint is loaded whole; {weights}"),
            ("load_module_only", load_module_only, False, f"a checkpoint is loaded whole; {weights}"),
            ("custom_load_fn", custom_load_fn, None, f"the engine shards what it reads; {weights}")))
        tag = None if tag is None else str(tag)
        nothing = tag is None and checkpoints.is_empty(load_dir)
        try:
            self.strata.load(load_dir, tag)
        except NotFound as error:
            if not nothing:
                raise
            if self.global_rank == 0:
                _log.warning("load_checkpoint: nothing is loaded, training begins anew: %s", error)
            return None, {}
        self.global_steps = self.strata.core.info().steps
        meta = self.strata.core.meta
        self.global_samples = int(meta.get(checkpoints.SAMPLES, self.global_steps * self.train_batch_size()))
        if load_lr_scheduler_states and self.lr_scheduler is not None:
            self._load_schedule(meta.get(checkpoints.SCHEDULE))
        return checkpoints.directory(load_dir, tag), json.loads(meta.get(checkpoints.CLIENT_STATE, "{}"))

    def _load_schedule(self, text):
        if text:
            checkpoints.set_schedule(text, self.lr_scheduler, self.optimizer)
        elif self.global_rank == 0:
            _log.warning("load_checkpoint: the checkpoint has no state of an lr_scheduler; this one goes on as it is")

    def save_16bit_model(self, save_dir, save_filename="model.safetensors", exclude_frozen_parameters=False):
        """Collective; every rank writes its part of the one file. One that is there is not replaced: AlreadyExists."""
        _refuse("save_16bit_model", (
            ("exclude_frozen_parameters", exclude_frozen_parameters, False, "the file has every param"),))
        os.makedirs(save_dir, exist_ok=True)
        self.strata.core.export_weights(f"{save_dir}/{save_filename}")
        return True

    def close(self):
        self.strata.close()


def _refuse(call, arguments):
    """Arguments (name, value, the only value, why) that would otherwise be ignored."""
    for name, value, only, why in arguments:
        if value != only:
            raise InvalidArgument(f"{call}({name}={value!r}): {why}")
