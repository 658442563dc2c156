"""Data, arguments and configurations for the tests of strata.transformers and strata.accelerate, and what they train.

Every run returns what it would print: the losses, norms and learning rates of all steps. Plain runs are transformers'
Trainer and accelerate's Accelerator, with DDP where there are several ranks.
"""
import gc

import accelerate
import torch
import transformers
from accelerate.state import AcceleratorState

import test_transformers as models
from strata.accelerate import Accelerator
from strata.transformers import StrataTrainer, StrataTrainingArguments

# Rounding only: the engine's update and reduction order are not torch's. Losses are near 4.
TOLERANCE = 2e-5
GPU_TOLERANCE = 2e-4  # a GPU's products and sums are rounded in other orders from run to run
QUIET = ['log_level="warn"', "deadline_seconds=60", "threads=1"]
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto",
                          "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": 0},
}


class Rows(torch.utils.data.Dataset):
    """Rows of tokens with something to learn; labels are partly -100, so micro-batches count differently many."""

    def __init__(self, count=34):
        g = torch.Generator().manual_seed(3)
        ids = torch.randint(1, 61, (count, 12), generator=g)
        ids[:, 1::2] = (ids[:, ::2] * 7 + 3) % 61
        labels = ids.clone()
        for row in range(count):
            labels[row, :row % 5] = -100
        self.rows = [{"input_ids": a, "labels": b} for a, b in zip(ids, labels)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class PlainArguments(transformers.TrainingArguments):
    """A plain Trainer takes every GPU it sees for one process, with a batch for each."""

    @property
    def n_gpu(self):
        return min(super().n_gpu, 1)


def arguments(folder, kind=PlainArguments, **changes):
    """34 rows in micro-batches of 4, 2 of them a step: an epoch's last step has a single one, of one rank or two."""
    return kind(**{
        "output_dir": str(folder), "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5, "learning_rate": 3e-3, "weight_decay": 0.1, "adam_beta2": 0.95, "num_train_epochs": 2,
        "warmup_steps": 3, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "save_strategy": "no", "optim": "adamw_torch", **changes})


def trainer(folder, make=models.llama, ours=True, config=None, **changes):
    data = {"model": make(), "train_dataset": Rows(), "eval_dataset": Rows(10)}
    if not ours:
        return transformers.Trainer(args=arguments(folder, **changes), **data)
    args = arguments(folder, StrataTrainingArguments, deepspeed=config or CONFIG, strata_overrides=QUIET, **changes)
    return StrataTrainer(args=args, **data)


def history(a_trainer):
    """[{loss, grad_norm, learning_rate, ...}] of the steps, and of evaluations."""
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss")
    entries = [{key: entry[key] for key in kept if key in entry} for entry in a_trainer.state.log_history]
    return [entry for entry in entries if entry]


def difference(a, b):
    """The largest between two lists of dicts of numbers, relative to 1 or the number."""
    assert [entry.keys() for entry in a] == [entry.keys() for entry in b] and a
    return max(abs(x[key] - y[key]) / max(1, abs(x[key])) for x, y in zip(a, b) for key in x)


def close(a_trainer):
    """Before the next one: accelerate's state is one per process."""
    if getattr(a_trainer, "engine", None) is not None:
        a_trainer.engine.close()


def free_ddp():
    """Before the process group ends: what a plain run has left of DDP would be the last to hold it, and then waits for
    Gloo's thread with the interpreter's lock, which that thread may want (torch 2.11)."""
    gc.collect()
    left = [o for o in gc.get_objects() if isinstance(o, torch.nn.parallel.DistributedDataParallel)]
    assert not left, [sorted(map(type, gc.get_referrers(o)), key=str) for o in left]


# ---- a loop written for accelerate --------------------------------------------------------------------------------


def accelerator(ours, config=None, steps=2, cpu=True):
    AcceleratorState._reset_state()
    if ours:  # config: False takes the launcher's file
        return Accelerator(config=CONFIG if config is None else config or None, gradient_accumulation_steps=steps,
                           cpu=cpu, overrides=QUIET)
    return accelerate.Accelerator(gradient_accumulation_steps=steps, cpu=cpu)


def prepared(ours, config=None, make=models.llama, steps=2, schedule=None, cpu=True):
    """(accelerator, model, optimizer, batches, scheduler); schedule(optimizer) makes another scheduler."""
    mine = accelerator(ours, config, steps, cpu)
    model = make()
    model.train()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}],
                                  lr=3e-3, betas=(0.9, 0.95))
    batches = torch.utils.data.DataLoader(Rows(), batch_size=4)
    schedule = schedule or (lambda optimizer: transformers.get_linear_schedule_with_warmup(optimizer, 4, 40))
    scheduler = schedule(optimizer)
    return mine, *mine.prepare(model, optimizer, batches, scheduler)


def loop(mine, model, optimizer, batches, scheduler, epochs=2):
    """[{loss, grad_norm, learning_rate}] of every micro-batch; the norm is of the step that ends with it."""
    found = []
    for _ in range(epochs):
        for batch in batches:
            with mine.accumulate(model):
                loss = model(**batch).loss
                mine.backward(loss)
                norm = mine.clip_grad_norm_(model.parameters(), 1.0) if mine.sync_gradients else 0.0
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            mean = mine.gather(loss.detach().reshape(1)).mean().item()
            found.append({"loss": mean, "grad_norm": float(norm), "learning_rate": scheduler.get_last_lr()[0]})
    return found


def evaluate(mine, model):
    """The predictions of all ranks for an odd number of rows."""
    rows = mine.prepare(torch.utils.data.DataLoader(Rows(7), batch_size=2))
    model.eval()
    found = []
    for batch in rows:
        with torch.no_grad():
            found.append(mine.gather_for_metrics(model(**batch).logits.argmax(-1)))
    model.train()
    return torch.cat(found)
