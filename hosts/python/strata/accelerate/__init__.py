"""For loops written against Hugging Face Accelerate: an Accelerator that shards with Strata.

    from strata.accelerate import Accelerator  # was: from accelerate import Accelerator
    accelerator = Accelerator(config="ds_config.json")
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

config.py reads the file of `accelerate launch --config_file`; `python -m strata.accelerate launch` starts the ranks;
agreement.py holds the configuration against the loop; optimizer.py is what a loop steps.
Needs the packages torch and accelerate; DeepSpeed is not needed.
"""
from .accelerator import Accelerator
from .optimizer import Optimizer

__all__ = ["Accelerator", "Optimizer"]
