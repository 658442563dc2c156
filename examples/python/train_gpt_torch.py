#!/usr/bin/env python3
"""Trains a small GPT on the bytes of a text file with PyTorch and Strata: the whole of a program.

The model is plain PyTorch. Strata is prepare(), backward(), step(), save() and load(); the manifest says what is
sharded and where it lies.

    PYTHONPATH=hosts/python python examples/python/train_gpt_torch.py kjv.txt           (torch 2.4 or newer)
    ... --set zero_optimization.stage=1                                                another setting
    torchrun --nproc-per-node 2 examples/python/train_gpt_torch.py kjv.txt             two ranks
    ... --checkpoints DIR                                                              save at the end, resume if there
"""
import argparse
import pathlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import strata.torch

WIDTH, HEADS, LAYERS, LENGTH = 128, 4, 4, 96


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.head(self.norm(x))


def batches(data, size, rank, start):
    """Endless random pieces of the text, of LENGTH bytes and the one after; every rank and run has its own."""
    random = torch.Generator().manual_seed(1000003 * start + rank)
    while True:
        at = torch.randint(0, len(data) - LENGTH - 1, (size, 1), generator=random)
        yield data[at + torch.arange(LENGTH + 1)].long()


@torch.no_grad()
def generate(model, prompt, count):
    """All ranks call it alike: at stage 3 a forward is collective."""
    model.eval()
    ids = torch.tensor([list(prompt)])
    for _ in range(count):
        ids = torch.cat([ids, model(ids[:, -LENGTH:])[:, -1:].argmax(-1)], 1)
    model.train()
    return bytes(ids[0].tolist()).decode(errors="replace")


def train(args):
    data = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
    torch.manual_seed(1)
    model = GPT()
    with strata.torch.prepare(model, args.manifest, overrides=args.set) as engine:
        size = int(engine.core.setting("train_micro_batch_size_per_gpu"))
        micro_batches = int(engine.core.setting("gradient_accumulation_steps"))
        if args.checkpoints and (args.checkpoints / "latest").exists():
            engine.load(args.checkpoints)
        done = engine.core.info().steps
        source = batches(data, size, engine.rank, done)
        for _ in range(done, args.steps):
            for _ in range(micro_batches):
                ids = next(source)
                loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
                engine.backward(loss)
            engine.step(tokens=micro_batches * size * LENGTH)  # for the line it logs every steps_per_print steps
        if args.checkpoints:
            engine.save(args.checkpoints, f"step{args.steps}")
        text = generate(model, b"And the LORD said ", args.generate)
        if engine.rank == 0:
            print(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("--manifest", default=pathlib.Path(__file__).with_suffix(".toml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoints", type=pathlib.Path)
    parser.add_argument("--generate", type=int, default=60, metavar="BYTES")
    train(parser.parse_args())
