#!/usr/bin/env python3
"""Trains a small next-byte model on a text file: the whole of a Strata program, in Python and numpy.

The last 16 bytes are embedded, joined, sent through two ReLU layers, and give 256 logits. Forward and backward are
below in plain numpy; Strata shards weights, gradients and optimizer state as the manifest says.

    PYTHONPATH=hosts/python python3 examples/python/train_bytes.py kjv.txt
    ... --threads 2 --set zero_optimization.stage=1       ranks as threads of one process
    STRATA_JOB=a STRATA_WORLD_SIZE=2 STRATA_RANK=0 ... &  ranks as processes: one command per rank
"""
import argparse
import pathlib

import numpy as np

import strata

CONTEXT, EMBED, HIDDEN = 16, 24, 256
LAST = 10  # steps that the last line takes the mean of
SIZES = [CONTEXT * EMBED, HIDDEN, HIDDEN, 256]  # of each layer's input, and of the logits


def register(engine):
    """Units [embed, layer0, layer1, layer2]; each is a list of its params. Rank 0 draws the weights."""
    dtype = "bf16" if engine.setting("bf16.enabled") == "true" else "fp32"
    embed = engine.unit("embed")
    units = [(embed, [embed.param("embed", (256, EMBED), dtype)])]
    for i, (rows, columns) in enumerate(zip(SIZES, SIZES[1:])):
        unit = engine.unit(f"layer{i}")
        units.append((unit, [unit.param(f"w{i}", (rows, columns), dtype), unit.param(f"b{i}", (columns,), dtype)]))
    engine.commit()
    random = np.random.default_rng(1)
    for _, params in units:
        for p in params:
            scale = 0 if len(p.shape) == 1 else p.shape[0] ** -0.5
            p.write(random.normal(0, scale, p.shape).astype(np.float32))
    return units


def forward(engine, units, context):
    """Logits, and the input of every layer. A unit's weights are whole between fetch and release only."""
    embed, (table,) = units[0]
    with engine.fetch(embed):
        inputs = [table.float32()[context].reshape(len(context), -1)]
    for unit, (w, b) in units[1:]:
        with engine.fetch(unit):
            x = inputs[-1] @ w.float32() + b.float32()
        inputs.append(np.maximum(x, 0))
    return x, inputs[:-1]


def backward(engine, units, context, d, inputs):
    """Hands over every gradient; a unit is reduced while the next one is computed."""
    for (unit, (w, b)), x in zip(reversed(units[1:]), reversed(inputs)):
        w.grad(x.T @ d)
        b.grad(d.sum(0))
        with engine.fetch(unit):
            d = d @ w.float32().T
        unit.grads_done()
        if unit is not units[1][0]:
            d = d * (x > 0)
    embed, (table,) = units[0]
    gradient = np.zeros(table.shape, np.float32)
    np.add.at(gradient, context, d.reshape(*context.shape, EMBED))
    table.grad(gradient)
    embed.grads_done()
    engine.end_backward()


def loss_and_gradient(logits, target):
    """Mean cross entropy, and its gradient by the logits."""
    logits = logits - logits.max(1, keepdims=True)
    p = np.exp(logits)
    total = p.sum(1, keepdims=True)
    rows = np.arange(len(target))
    loss = float(np.mean(np.log(total[:, 0]) - logits[rows, target]))
    p /= total
    p[rows, target] -= 1
    return loss, p / len(target)


def train(args, thread_rank=None):
    data = np.frombuffer(args.text.read_bytes(), np.uint8)
    with strata.Engine(args.manifest, overrides=args.set, thread_rank=thread_rank) as engine:
        units = register(engine)
        batch = int(engine.setting("train_micro_batch_size_per_gpu"))
        micro_batches = int(engine.setting("gradient_accumulation_steps"))
        random = np.random.default_rng([2, engine.rank])
        losses = []
        for _ in range(args.steps):
            for _ in range(micro_batches):
                at = random.integers(0, len(data) - CONTEXT, batch)
                context, target = data[at[:, None] + np.arange(CONTEXT)], data[at + CONTEXT]
                logits, inputs = forward(engine, units, context)
                loss, d = loss_and_gradient(logits, target)
                backward(engine, units, context, d, inputs)
                losses.append(loss)
            # Loss and tokens are for the line that the engine logs every steps_per_print steps.
            engine.step(loss=np.mean(losses[-micro_batches:]), tokens=micro_batches * batch)
        if engine.rank == 0:
            print(f"{args.steps} steps, mean loss of the last {min(args.steps, LAST)}: "
                  f"{np.mean(losses[-LAST * micro_batches:]):.4f}")
        return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--manifest", default=pathlib.Path(__file__).with_suffix(".toml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, help="ranks as threads")
    options = parser.parse_args()
    if options.threads:
        strata.run_threads(options.threads, lambda rank: train(options, rank))
    else:
        train(options)
