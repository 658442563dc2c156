"""One rank of test_trainer.test_two_ranks: Trainers on Strata and with DDP, one after the other.

Arguments: a folder to write to, and "cpu" or "cuda".
"""
import json
import pathlib
import sys

import conftest  # noqa: F401 paths and threads
import hf
import test_transformers as models
import torch
import transformers
from torch_ranks import deterministic_cuda


def run(folder, ours, make=models.llama, resume=None, **changes):
    trainer = hf.trainer(folder, make, ours, **changes)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main(out, device):
    if device == "cuda":
        deterministic_cuda()
    result, place = {}, {"use_cpu": device == "cpu"}
    for name, make in (("llama", models.llama), ("bert", models.bert)):
        for kind, ours in (("plain", False), ("ours", True)):
            trainer = run(out / "none", ours, make, eval_strategy="epoch", **place)
            result[f"{kind} {name}"] = hf.history(trainer)
            if name == "llama":
                predictions = "predictions" if ours else "plain predictions"
                result[predictions] = trainer.predict(hf.Rows(7)).predictions.argmax(-1).tolist()
                prompt = torch.tensor([[1, 5, 9, 13]], device=trainer.args.device)
                trainer.model.eval()
                result["generated" if ours else "plain generated"] = trainer.model.generate(
                    prompt, max_new_tokens=6, do_sample=False).tolist()
            result["rank"] = trainer.args.process_index
            hf.close(trainer)
    saving = {**place, "save_strategy": "steps", "save_steps": 3, "num_train_epochs": 4}
    trainer = run(out / "whole", True, **saving)
    result["whole"] = hf.history(trainer)
    hf.close(trainer)
    # As in transformers 5.17, where only ranks that write come to _save.
    transformers.Trainer.save_model = lambda self, folder, _internal_call: self.args.should_save and self._save(folder)
    trainer = run(out / "whole", True, resume=str(out / "whole" / "checkpoint-3"), **saving)
    result["resumed"] = hf.history(trainer)[3:]
    hf.close(trainer)
    (out / f"rank{result['rank']}.json").write_text(json.dumps(result))
    hf.free_ddp()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # its threads do not outlive the interpreter


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
