"""For programs written against transformers.Trainer: the same Trainer, sharded with Strata.

    from strata.transformers import StrataTrainer, StrataTrainingArguments
    (args,) = transformers.HfArgumentParser(StrataTrainingArguments).parse_args_into_dataclasses()
    StrataTrainer(model=model, args=args, train_dataset=data).train()  # --deepspeed ds_config.json --bf16 true ...

arguments.py reads the DeepSpeed configuration and refuses what cannot be had; trainer.py is what a Trainer does
otherwise here. DeepSpeed is not needed.
"""
from . import version  # noqa: F401 first: an older transformers lacks what the others import
from .arguments import StrataSeq2SeqTrainingArguments, StrataTrainingArguments
from .trainer import StrataSeq2SeqTrainer, StrataTrainer

__all__ = ["StrataSeq2SeqTrainer", "StrataSeq2SeqTrainingArguments", "StrataTrainer", "StrataTrainingArguments"]
