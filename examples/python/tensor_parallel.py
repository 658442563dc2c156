#!/usr/bin/env python3
"""A layer split over two tensor-parallel ranks, as Megatron splits it, beside the same layer whole: same losses, same
gradient norms. All that Strata is told is how large the groups are, and which params are slices.

    PYTHONPATH=hosts/python /usr/bin/python3 examples/python/tensor_parallel.py

y = relu(x @ up) @ down + bias. `up` is split by columns, `down` by rows, `bias` is the same on every rank. Adding up
what the ranks computed is the program's own business: here they are threads; processes would use MPI or
torch.distributed.
"""
import threading

import numpy as np

import strata

WIDTH, HIDDEN, BATCH, STEPS = 16, 64, 32, 5
MANIFEST = f"""
train_micro_batch_size_per_gpu = {BATCH}
gradient_accumulation_steps = 1
gradient_clipping = 0.5
log_level = "warn"
optimizer.params.lr = 1e-2
zero_optimization.stage = 3
"""


class Sum:
    """The sum of an array over ranks that are threads."""

    def __init__(self, ranks):
        self.parts = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=60)

    def __call__(self, rank, part):
        self.parts[rank] = part
        self.barrier.wait()
        total = sum(self.parts)
        self.barrier.wait()  # everybody has read
        return total


def train(thread_rank, over_ranks):
    """[(loss, gradient norm)] of each step, on one rank of a world that holds the layer once."""
    overrides = [f"tensor_model_parallel_size={thread_rank.world}"]
    with strata.Engine(text=MANIFEST, overrides=overrides, thread_rank=thread_rank) as engine:
        rank, size = engine.ranks.tensor_model_parallel_rank, engine.ranks.tensor_model_parallel_size
        mine = slice(rank * HIDDEN // size, (rank + 1) * HIDDEN // size)
        layer = engine.unit("layer")
        up = layer.param("up", (WIDTH, HIDDEN // size), tensor_model_parallel=True)
        down = layer.param("down", (HIDDEN // size, WIDTH), tensor_model_parallel=True)
        bias = layer.param("bias", (WIDTH,))  # a copy: counted once in the norm
        engine.commit()
        random = np.random.default_rng(1)  # the same weights and samples on the ranks of one model
        up.write(random.normal(0, 0.3, (WIDTH, HIDDEN)).astype(np.float32)[:, mine])
        down.write(random.normal(0, 0.3, (HIDDEN, WIDTH)).astype(np.float32)[mine])
        results = []
        for _ in range(STEPS):
            x, target = random.normal(size=(2, BATCH, WIDTH)).astype(np.float32)
            with engine.fetch(layer):
                hidden = np.maximum(x @ up.view(), 0)
                error = over_ranks(rank, hidden @ down.view()) + bias.view() - target
                d = error / BATCH
                up.grad(x.T @ (d @ down.view().T * (hidden > 0)))
                down.grad(hidden.T @ d)
                bias.grad(d.sum(0))
            engine.end_backward()
            engine.step()
            results.append((0.5 * float(np.sum(error * d)), engine.info().grad_norm))
        return results


def main():
    runs = {ranks: strata.run_threads(ranks, lambda rank, add=Sum(ranks): train(rank, add))[0] for ranks in (1, 2)}
    print("step   loss, whole   norm, whole    loss, split   norm, split")
    for step, (whole, split) in enumerate(zip(runs[1], runs[2]), 1):
        print("{:4} {:13.6f} {:13.6f}  {:13.6f} {:13.6f}".format(step, *whole, *split))


if __name__ == "__main__":
    main()
