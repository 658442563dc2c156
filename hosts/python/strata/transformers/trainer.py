"""Trainers whose model, optimizer and checkpoints are an engine's. The loop, and all else, is transformers'.

A stock Trainer cannot do it: its backward, its wrapping of the model and its checkpoints are chosen inside, between
DDP, FSDP and DeepSpeed. So the class is replaced, and here is what differs.
"""
import torch
import transformers

from ..accelerate import Accelerator
from ..errors import InvalidArgument
from ..torch import GradNorm
from .arguments import StrataSeq2SeqTrainingArguments, StrataTrainingArguments


class _OnStrata:
    """The difference, in front of a Trainer class."""

    @property
    def engine(self):
        """The strata.torch.Engine; None before the first train, evaluate or predict."""
        return self.accelerator.engine

    def create_accelerator_and_postprocess(self):
        args = self.args
        if not isinstance(args, (StrataTrainingArguments, StrataSeq2SeqTrainingArguments)):
            raise InvalidArgument(f"{type(self).__name__} needs StrataTrainingArguments, not {type(args).__name__}")
        with args.used_by_strata():
            super().create_accelerator_and_postprocess()
        Accelerator.adopt(self.accelerator, args.strata_config, args.strata_auto, args.strata_keys,
                          args.strata_units, args.strata_overrides)

    def _prepare_input(self, data):
        """Floating-point inputs take the weights' dtype, as with DeepSpeed."""
        data = super()._prepare_input(data)
        if isinstance(data, torch.Tensor) and data.is_floating_point() and self.args.bf16:
            return data.bfloat16()
        return data

    def evaluation_loop(self, *args, **kwargs):
        if self.engine is None:  # before any training: the optimizer comes now, a model is prepared once
            self.create_optimizer()
            _, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        return super().evaluation_loop(*args, **kwargs)

    def log(self, logs, *args, **kwargs):
        super().log({key: float(value) if isinstance(value, GradNorm) else value for key, value in logs.items()},
                    *args, **kwargs)

    # ---- checkpoints: the engine's lies beside what the Trainer writes, and has the weights too ----

    _gathered = None  # a state dict, while save_model runs

    def save_model(self, *args, **kwargs):
        """Collective. Gathered here: in some versions of transformers only the ranks that write come to _save."""
        self._gathered = self.engine and self.engine.state_dict(wanted=self.args.should_save)
        try:
            super().save_model(*args, **kwargs)
        finally:
            self._gathered = None

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, self._gathered if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir):
        self.accelerator.save_engine(output_dir)
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """Nothing yet: weights come with the optimizer's state, once the model is prepared."""

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is not None:
            self.accelerator.load_engine(checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self):
        self.accelerator.load_engine(self.state.best_model_checkpoint)


class StrataTrainer(_OnStrata, transformers.Trainer):
    """transformers.Trainer on Strata, with StrataTrainingArguments."""


class StrataSeq2SeqTrainer(_OnStrata, transformers.Seq2SeqTrainer):
    """transformers.Seq2SeqTrainer on Strata, with StrataSeq2SeqTrainingArguments."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
        """At stage 3 ranks generate in step: those that are done go on until the last one is."""
        if self.engine.world > 1 and self.args.predict_with_generate:
            gen_kwargs = {"synced_gpus": True, **getattr(self, "_gen_kwargs", {}), **gen_kwargs}
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
