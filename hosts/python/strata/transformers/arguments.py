"""TrainingArguments whose --deepspeed is read by strata.deepspeed. Everything is checked when they are made.

"auto" in the configuration takes the arguments' values, a key that says something else than its argument is refused,
and so are arguments that cannot be had here, by name.
"""
import contextlib
from dataclasses import dataclass, field

import transformers
from transformers.training_args import OptimizerNames

from ..accelerate import config as files
from ..accelerate.agreement import refuse_foreign_launch
from ..deepspeed import config as deepspeed
from ..deepspeed.config import Key, Refused
from ..errors import InvalidArgument

_EVALUATION = "weights have one dtype in training and evaluation: bf16"
_SHARDED = "Strata shards"
_REFUSED = {  # argument: why any value but "off" is refused
    "fp16": "training in fp16 with loss scaling is not there; pass bf16=True in its place, with \"auto\" for "
            "fp16.enabled and bf16.enabled in the configuration", "fp16_full_eval": _EVALUATION,
    "bf16_full_eval": _EVALUATION, "fsdp": _SHARDED, "parallelism_config": "only data parallelism is there",
    "auto_find_batch_size": "a model is prepared once; find per_device_train_batch_size beforehand",
    "save_on_each_node": "a checkpoint is one folder that all ranks write to",
    "ddp_find_unused_parameters": _SHARDED, "ddp_bucket_cap_mb": "reduce_bucket_size is its like",
    "ddp_broadcast_buffers": _SHARDED, "ddp_static_graph": _SHARDED,
    "debug": "its hooks read weights after their forward, when they are released",
}
_ADAMW = ("adamw_torch", "adamw_torch_fused")


class _Arguments:
    """What StrataTrainingArguments and StrataSeq2SeqTrainingArguments share."""

    def __post_init__(self):
        refuse_foreign_launch()
        given, self.deepspeed = self.deepspeed, None  # transformers would import DeepSpeed for it
        self._by_strata = False
        super().__post_init__()
        self.deepspeed = given
        is_text = isinstance(given, str) and given.lstrip().startswith("{")
        config = deepspeed.loads(given) if is_text else given
        file = files.from_environment() if config is None else None
        if config is None and file is None:
            raise InvalidArgument("StrataTrainingArguments need deepspeed: a DeepSpeed configuration, as a dict or the "
                                  "path of a JSON file")
        if file is not None:
            config = file.deepspeed
        self.strata_keys = file.keys if file is not None else []
        self._agree_with(config)
        self.optim = OptimizerNames.ADAMW_TORCH  # there is one implementation, on the device or off it

    def _agree_with(self, config):
        """Arguments and configuration, brought to agree; all that cannot be had is refused at once."""
        wrong, of = self._wrong(), "training arguments"
        try:
            self.strata_config, self.strata_auto = deepspeed.fill(config, self._settings(), (
                "train_batch_size", "fp16.enabled", "bfloat16.enabled"))
            deepspeed.read(self.strata_config, self.strata_auto, hidden_size=1,  # the model's, once it is known
                           advice=lambda path: "write it in the configuration")
        except Refused as error:
            of = f"{of}, {error.of}" if wrong else error.of
            wrong += error.keys
        if wrong:
            raise Refused(wrong, of)

    def _wrong(self):
        wrong = [Key(name, getattr(self, name), None, reason) for name, reason in _REFUSED.items()
                 if getattr(self, name, None) not in (None, False, "", [], {})]
        if self.optim not in _ADAMW:
            wrong.append(Key("optim", str(self.optim.value), None, f"the engine's optimizer is AdamW: {_ADAMW[0]}"))
        if self.save_only_model and self.load_best_model_at_end:
            wrong.append(Key("save_only_model", True, None, "load_best_model_at_end loads a whole checkpoint"))
        return wrong

    def _settings(self):
        """{path: (value, argument)}: what DeepSpeed's configuration says, too."""
        micro, steps = self.per_device_train_batch_size, self.gradient_accumulation_steps
        total = micro * steps * self.world_size
        return {
            "train_micro_batch_size_per_gpu": (micro, "per_device_train_batch_size"),
            "gradient_accumulation_steps": (steps, "gradient_accumulation_steps"),
            "train_batch_size": (total, "per_device_train_batch_size * gradient_accumulation_steps * ranks"),
            "gradient_clipping": (self.max_grad_norm, "max_grad_norm"),
            "bf16.enabled": (self.bf16, "bf16"), "bfloat16.enabled": (self.bf16, "bf16"),
            "fp16.enabled": (self.fp16, "fp16"),
            "optimizer.params.lr": (self.learning_rate, "learning_rate"),
            "optimizer.params.betas": ([self.adam_beta1, self.adam_beta2], "adam_beta1, adam_beta2"),
            "optimizer.params.eps": (self.adam_epsilon, "adam_epsilon"),
            "optimizer.params.weight_decay": (self.weight_decay, "weight_decay"),
        }

    @property
    def place_model_on_device(self):
        """Params go where the manifest's plugins.device says, when the model is prepared."""
        return False

    @property
    def n_gpu(self):
        """One per process; more are used by more ranks."""
        return min(super().n_gpu, 1)

    @contextlib.contextmanager
    def used_by_strata(self):
        self._by_strata = True
        try:
            yield
        finally:
            self._by_strata = False

    @property
    def deepspeed_plugin(self):
        """What a Trainer asks for to find out about DeepSpeed: one that is not ours would train without sharding."""
        if not self._by_strata:
            raise InvalidArgument("StrataTrainingArguments with a Trainer that does not know them: use "
                                  "strata.transformers.StrataTrainer in place of transformers.Trainer")
        return None

    @deepspeed_plugin.setter
    def deepspeed_plugin(self, value):
        if value is not None:
            raise InvalidArgument("StrataTrainingArguments take no DeepSpeed plugin")


_OVERRIDES = {"help": "Settings of the manifest, key=value, applied after the DeepSpeed configuration."}
_UNITS = {"help": "Classes of the modules that are fetched together; by default the repeated blocks."}


@dataclass
class StrataTrainingArguments(_Arguments, transformers.TrainingArguments):
    """transformers.TrainingArguments for StrataTrainer; `deepspeed` must be given."""

    strata_overrides: list[str] | None = field(default=None, metadata=_OVERRIDES)
    strata_units: list[str] | None = field(default=None, metadata=_UNITS)


@dataclass
class StrataSeq2SeqTrainingArguments(_Arguments, transformers.Seq2SeqTrainingArguments):
    """transformers.Seq2SeqTrainingArguments for StrataSeq2SeqTrainer; `deepspeed` must be given."""

    strata_overrides: list[str] | None = field(default=None, metadata=_OVERRIDES)
    strata_units: list[str] | None = field(default=None, metadata=_UNITS)
