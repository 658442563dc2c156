"""One rank as a process: trains small_gpt and writes FOLDER/rank<number>. rank_program.py FOLDER 'JSON'

stage, steps, extra, model (its options) as small_gpt.train has them; cuda: on this rank's GPU, over NCCL where there
are several; compile: every block, by this backend; die: [rank, step, moment], where that rank kills itself in that
step.
"""
import json
import os
import signal
import sys

import conftest  # noqa: F401 paths and threads
import small_gpt
import torch


class Death:
    """kill -9 of this process at a moment of a step: in the model's forward, in its backward, between the last gradient
    and the end of the reduction, or while the update runs."""

    def __init__(self, model, engine, step, moment):
        self._step, self._steps_begun, self._gradients = step, 0, 0
        model.register_forward_pre_hook(self._begin)
        if moment == "forward":
            model.blocks[1].norm2.register_forward_hook(lambda *_: self._strike())
        elif moment == "backward":
            model.blocks[1].register_forward_hook(lambda _, args, y: y.register_hook(lambda _: self._strike()) and None)
        elif moment == "reduction":
            self._count = len(list(model.parameters()))
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(self._note_gradient)
        else:
            assert moment == "step"
            step_of_engine = engine.step
            engine.step = lambda: (step_of_engine(), self._strike())

    def _begin(self, *_):
        self._steps_begun, self._gradients = self._steps_begun + 1, 0

    def _note_gradient(self, _):
        self._gradients += 1
        if self._gradients == self._count:
            self._strike()

    def _strike(self):
        if self._steps_begun == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder, stage=3, steps=10, extra=(), cuda=False, compile=None, die=None, model=None):
    model = small_gpt.make(**(model or {}))
    if cuda:
        torch.use_deterministic_algorithms(True)
        extra = small_gpt.on_cuda(extra, int(os.environ["STRATA_WORLD_SIZE"]))
    for block in model.blocks if compile else ():
        block.compile(backend=compile)
    with small_gpt.prepare(model, stage, extra) as engine:
        if die and engine.rank == die[0]:
            Death(model, engine, *die[1:])
        losses = small_gpt.loop(model, engine, steps, rank=engine.rank)
        torch.save((losses, engine.state_dict(), engine.core.counters(last_step=True)._asdict()),
                   f"{folder}/rank{engine.rank}")


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.argv[2]))
