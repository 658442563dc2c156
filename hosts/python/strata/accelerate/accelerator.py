"""Accelerator: accelerate's own, with the model, its optimizer, backward, clipping and state in Strata's hands.

What it inherits is what has nothing to do with weights: data loaders, gathering of results, printing, trackers,
accumulation, random states. Everything else that accelerate's class can do is refused by name.
"""
import logging
import pathlib
import shutil

import accelerate
import torch
from accelerate.utils import DynamoBackend, GradientAccumulationPlugin

from ..deepspeed import config as deepspeed
from ..errors import FailedPrecondition, InvalidArgument, NotFound
from ..torch import GradNorm, prepare
from . import agreement, checkpoints
from . import optimizer as optimizers

_log = logging.getLogger(__name__)
_KEPT = frozenset("""
    accumulate autocast check_trigger clear device dispatch_batches distributed_type even_batches fp8_backend gather
    gather_for_metrics get_tracker gradient_accumulation_steps init_trackers is_composable_parallelism_enabled is_fsdp2
    is_last_process is_local_main_process is_main_process local_main_process_first local_process_index log logging_dir
    main_process_first mixed_precision multi_device no_sync non_blocking num_processes on_last_process
    on_local_main_process on_local_process on_main_process on_process optimizer_step_was_skipped pad_across_processes
    parallelism_config prepare_data_loader prepare_scheduler print process_index profile project_dir reduce
    register_for_checkpointing register_load_state_pre_hook register_save_state_pre_hook save save_iteration save_model
    set_trigger should_save_model skip_first_batches split_batches split_between_processes sync_gradients
    torch_device_mesh unscale_gradients unwrap_model use_distributed use_seedable_sampler use_stateful_dataloader
    verify_device_map wait_for_everyone
""".split())
_REFUSED_OPTIONS = {
    "deepspeed_plugin": "pass config=, a DeepSpeed configuration or Accelerate's file",
    "deepspeed_plugins": "pass config=, a DeepSpeed configuration or Accelerate's file",
    "fsdp_plugin": "Strata shards", "megatron_lm_plugin": "Strata shards",
    "torch_tp_plugin": "tensor parallelism is not there", "parallelism_config": "only data parallelism is there",
}


class Accelerator(accelerate.Accelerator):
    """accelerate.Accelerator(...) with three arguments more.

    config     a DeepSpeed configuration, as a dict or the path of a JSON file, or the path of Accelerate's YAML file;
               None: the file of `python -m strata.accelerate launch`
    units      as of strata.torch.prepare
    overrides  settings of the manifest, "key=value", applied last

    `engine` is the strata.torch.Engine once prepare() was called, `report` what became of every key.
    """

    def __init__(self, *args, config=None, units=None, overrides=(), gradient_accumulation_steps=1,
                 gradient_accumulation_plugin=None, mixed_precision=None, cpu=False, **options):
        agreement.refuse_foreign_launch()
        for name, reason in _REFUSED_OPTIONS.items():
            if options.get(name) is not None:
                raise InvalidArgument(f"Accelerator({name}=...): {reason}")
        file = agreement.file_of(config)
        accumulation = gradient_accumulation_plugin or GradientAccumulationPlugin(num_steps=gradient_accumulation_steps)
        accumulation.num_steps = agreement.accumulation(file.deepspeed, accumulation.num_steps)
        if mixed_precision is None:
            mixed_precision = agreement.precision(file)
        if str(mixed_precision) not in ("no", "bf16"):
            raise InvalidArgument(f"Accelerator(mixed_precision={str(mixed_precision)!r}): weights are fp32 or bf16")
        super().__init__(*args, mixed_precision=mixed_precision, cpu=cpu or file.use_cpu,
                         gradient_accumulation_plugin=accumulation, **options)
        self._configure(file.deepspeed, {}, units, overrides, file.keys)

    @classmethod
    def adopt(cls, accelerator, config, auto, keys, units=None, overrides=()):
        """Makes an accelerate.Accelerator that somebody else has built, a Trainer, into one of this class.

        config and auto as of deepspeed.read; keys of a file that they come from, for the report.
        """
        accelerator.__class__ = cls
        accelerator._configure(config, auto, units, overrides, keys)

    def _configure(self, config, auto, units, overrides, file_keys):
        self.engine, self.report = None, []
        self._config, self._auto, self._file_keys = config, auto, file_keys
        self._units, self._overrides = units, list(overrides or [])
        self._model = self._optimizer = None
        self._is_freed = False  # another model may take this one's place

    # ---- preparing ----

    def prepare(self, *objects, device_placement=None):
        """accelerate's prepare. The model and its optimizer, if it has one, come in the same call."""
        models = [item for item in objects if isinstance(item, torch.nn.Module)]
        given = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
        if len(models) > 1 or len(given) > 1:
            raise InvalidArgument(f"prepare: {len(models)} models and {len(given)} optimizers; an Accelerator here has "
                                  f"one model, and its optimizer")
        if device_placement is not None:
            raise InvalidArgument("prepare(device_placement=...): the manifest's plugins.device says where params lie")
        if models:
            loaders = [item for item in objects if isinstance(item, torch.utils.data.DataLoader)]
            self._open(models[0], given[0] if given else None, loaders)
        elif given and not isinstance(given[0], optimizers.Optimizer):
            raise InvalidArgument("prepare: an optimizer without its model; prepare both in one call")
        return super().prepare(*objects)

    def prepare_model(self, model, device_placement=None, evaluation_mode=False):
        """The model itself, whose params are with the engine from then on."""
        self._open(model, None, [])
        return model

    def prepare_optimizer(self, optimizer, device_placement=None):
        if not isinstance(optimizer, optimizers.Optimizer):
            self._optimizer = optimizer = optimizers.Optimizer(optimizer, self)
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        return optimizer

    def _open(self, model, optimizer, loaders):
        """Hands the model to an engine, unless it is with one already."""
        if self.engine is not None and model is self._model:
            if optimizer is not None and optimizer is not self._optimizer:
                raise InvalidArgument("prepare: the model is prepared already; prepare it and its optimizer in one "
                                      "call")
            return
        if self.engine is not None:
            if not self._is_freed:
                raise InvalidArgument("prepare: an Accelerator here has one model; free_memory() lets another follow")
            self.engine.close()
            self.engine = None
        if optimizer is not None and isinstance(optimizer, optimizers.Optimizer):
            optimizer = optimizer.optimizer
        groups = optimizers.groups(optimizer, model) if optimizer is not None else None
        manifest = agreement.manifest(self, self._config, self._auto, model, optimizer, loaders)
        self._report_on([*self._file_keys, *manifest.keys_on(self.device.type)])
        with manifest.named():
            placed = manifest.on_gpus(self.num_processes) if self.device.type == "cuda" else []
            self.engine = prepare(model, text=manifest.text, overrides=placed + self._overrides, units=self._units,
                                  groups=groups)
        self._gradient_steps = int(self.engine.core.setting("gradient_accumulation_steps"))
        self.engine.dropped_by = "accelerator.engine.zero_grad()"
        self._model, self._is_freed = model, False
        self._check_ranks()
        _move_buffers(model, self.engine.device)
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            model.compile(**self.state.dynamo_plugin.to_kwargs())  # in place: the model stays the object it is

    def _report_on(self, keys):
        self.report = [deepspeed.line(key) for key in deepspeed.in_order(keys)]
        if self.is_main_process:
            deepspeed.log_report(keys, _log)

    def _check_ranks(self):
        found, wanted = (self.engine.rank, self.engine.world), (self.process_index, self.num_processes)
        if found != wanted:
            raise FailedPrecondition(
                f"the engine is rank {found[0]} of {found[1]}, accelerate's process {wanted[0]} of {wanted[1]}: start "
                f"the ranks with torchrun or `python -m strata.accelerate launch`, which both read")
        if self.engine.device.type != self.device.type:
            raise FailedPrecondition(f"the engine's weights are on {self.engine.device}, accelerate's device is "
                                     f"{self.device}: set plugins.device, or use the CPU (cpu=True, --use_cpu)")

    # ---- the loop ----

    def backward(self, loss, **kwargs):
        """Of a loss that is a mean over this rank's micro-batch; the sum is divided by gradient_accumulation_steps."""
        if kwargs:
            raise InvalidArgument(f"backward({', '.join(kwargs)}=...): backward takes the loss alone")
        self._needs_engine("backward")
        factor = self._gradient_steps / self.gradient_accumulation_steps  # the engine divides by the first
        self.engine.backward(loss if factor == 1 else loss * factor)

    def _step(self, settings):
        """One optimizer step, with each group's settings. Micro-batches that an epoch's last step is short of count as
        zeros."""
        self.engine.check_whole("optimizer.step")
        if self.engine.backwards == 0:
            raise FailedPrecondition("optimizer.step: no accelerator.backward since the last step")
        own = self.engine.param_groups[1:]  # group 0, of params in no group, is empty
        if len(settings) != len(own):
            raise FailedPrecondition(f"optimizer.step: the optimizer has {len(settings)} param groups, it was prepared "
                                     f"with {len(own)}")
        for group, given in zip(own, settings):
            group.update(given)
        self.engine.skip_micro_batches()
        self.engine.step()

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        """The norm of the step to come, a number after it: float(norm). That step clips to max_norm.

        Infinity asks for the norm only: the step clips to gradient_clipping.
        """
        self._needs_engine("clip_grad_norm_")
        if norm_type != 2:
            raise InvalidArgument(f"clip_grad_norm_(norm_type={norm_type}): the norm is the 2-norm")
        if max_norm == float("inf"):
            return GradNorm(self.engine)
        return self.engine.clip_grad_norm_(max_norm)

    def _needs_engine(self, what):
        if self.engine is None:
            raise FailedPrecondition(f"{what}: call prepare(model, optimizer, ...) first")

    # ---- state ----

    def get_state_dict(self, model, unwrap=True):
        """The model's state as CPU tensors on every rank. Collective."""
        if self.engine is None or model is not self._model:
            return super().get_state_dict(model, unwrap)
        return self.engine.state_dict()

    def save_state(self, output_dir=None, safe_serialization=True, **options):
        """A folder with the engine's checkpoint and what accelerate keeps. Collective. Returns its path.

        What was there is kept until the new is whole, and goes then.
        """
        if options:
            raise InvalidArgument(f"save_state({', '.join(options)}=...): there is nothing to choose")
        self._needs_engine("save_state")
        self.engine.check_whole("save_state")
        naming = self.project_configuration
        if naming.automatic_checkpoint_naming:
            folder = checkpoints.next_folder(self.project_dir, self.save_iteration)
        elif output_dir is not None:
            folder = pathlib.Path(output_dir).expanduser()
        else:
            raise InvalidArgument("save_state: output_dir is missing, and automatic_checkpoint_naming is off")
        name = checkpoints.new_name(folder, self.engine.core.info().steps)
        self.wait_for_everyone()  # all have looked
        try:
            self._save_beside(folder / checkpoints.BESIDE / name, safe_serialization)
            self.engine.core.meta[checkpoints.META] = name
            self._save_engine(folder, name)
        except BaseException:
            if self.is_main_process:
                is_new = naming.automatic_checkpoint_naming
                shutil.rmtree(folder if is_new else folder / checkpoints.BESIDE / name, ignore_errors=True)
            raise
        naming.iteration += 1
        if naming.automatic_checkpoint_naming and naming.total_limit is not None and self.is_main_process:
            checkpoints.keep_newest(self.project_dir, naming.total_limit)
        return str(folder)

    def _save_beside(self, folder, safe_serialization):
        """accelerate's save_state, into that folder."""
        naming, error = self.project_configuration, None
        automatic, iteration = naming.automatic_checkpoint_naming, naming.iteration
        naming.automatic_checkpoint_naming = False
        try:
            super().save_state(str(folder), safe_serialization)
        except Exception as e:
            error = e
        finally:
            naming.automatic_checkpoint_naming, naming.iteration = automatic, iteration
        checkpoints.of_all_ranks(error, "save_state")

    def load_state(self, input_dir=None, load_kwargs=None, **options):
        """What save_state saved, at any number of ranks and any stage. Collective."""
        if options:
            raise InvalidArgument(f"load_state({', '.join(options)}=...): there is nothing to choose")
        self._needs_engine("load_state")
        if input_dir is not None:
            folder = pathlib.Path(input_dir).expanduser()
        elif self.project_configuration.automatic_checkpoint_naming:
            folder = checkpoints.newest_folder(self.project_dir)
        else:
            raise InvalidArgument("load_state: input_dir is missing, and automatic_checkpoint_naming is off")
        if (folder / checkpoints.ENGINE).is_dir() and not (folder / checkpoints.BESIDE).is_dir():
            raise checkpoints.missing(folder)
        self.load_engine(folder)
        super().load_state(str(checkpoints.beside(folder, self.engine)), load_kwargs)

    def save_engine(self, folder):
        """Weights and optimizer state into <folder>/strata; what was there goes once the new is whole. Collective."""
        self._needs_engine("save_engine")
        folder = pathlib.Path(folder)
        name = checkpoints.new_name(folder, self.engine.core.info().steps)
        self.wait_for_everyone()  # all have looked
        self._save_engine(folder, name)

    def _save_engine(self, folder, name):
        if self.is_main_process:
            (folder / checkpoints.ENGINE).mkdir(parents=True, exist_ok=True)
        self.wait_for_everyone()
        self.engine.save(folder / checkpoints.ENGINE, name)
        if self.is_main_process:
            checkpoints.keep_only(folder, name)
        self.wait_for_everyone()

    def load_engine(self, folder):
        """What save_engine saved. Collective."""
        self._needs_engine("load_engine")
        root = pathlib.Path(folder) / checkpoints.ENGINE
        if not root.is_dir():
            raise NotFound(f"{folder} has no folder {root.name}: it is no checkpoint of Strata's, only its weights can "
                           f"be loaded, with from_pretrained before prepare")
        self.engine.load(root)

    def free_memory(self, *objects):
        """accelerate's, after which another model may be prepared; this one's engine is closed then, or at the end."""
        self._is_freed = True
        return super().free_memory(*objects)

    def end_training(self):
        if self.engine is not None:
            self.engine.close()
        super().end_training()


def _move_buffers(model, device):
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _refusal(name):
    def refuse(self, *_, **__):
        raise InvalidArgument(f"Accelerator.{name} is not offered by strata.accelerate")
    return refuse


for _name in dir(accelerate.Accelerator):
    _inherited = not _name.startswith("_") and _name not in _KEPT and _name not in vars(Accelerator)
    if _inherited and callable(getattr(accelerate.Accelerator, _name)):
        setattr(Accelerator, _name, _refusal(_name))
