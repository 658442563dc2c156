"""One rank as a process: trains small_gpt and writes its losses and state. rank_program.py OUT STAGE [LAST_STEP]

With LAST_STEP, rank 1 kills itself in the backward of that step.
"""
import os
import signal
import sys

import conftest  # noqa: F401 paths and threads
import small_gpt
import torch

if __name__ == "__main__":
    out, stage = sys.argv[1], int(sys.argv[2])
    model = small_gpt.make()
    if len(sys.argv) == 3:
        torch.save(small_gpt.train(stage, steps=10, model=model), out)
    else:
        steps = []
        with small_gpt.prepare(model, stage) as engine:
            def die(grad):
                steps.append(grad)
                if engine.rank == 1 and len(steps) == int(sys.argv[3]):
                    os.kill(os.getpid(), signal.SIGKILL)

            model.blocks[1].register_forward_hook(lambda module, args, y: y.register_hook(die) and None)
            small_gpt.loop(model, engine, 1000, rank=engine.rank)
