"""A small GPT in plain PyTorch, a manifest for it, and plain PyTorch training of it with an fp32-master AdamW.

Nothing in the model knows of Strata. The reference keeps the weights in the dtype they are trained in, and the
optimizer in fp32: master weights, two moments, gradients as mean over ranks and micro-batches.
"""
import math
import threading

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import strata
import strata.torch

VOCABULARY, WIDTH, HEADS, LENGTH = 61, 32, 4, 12
MANIFEST = """
train_micro_batch_size_per_gpu = 4
gradient_accumulation_steps = {micro}
gradient_clipping = {clip}
deadline_seconds = 30
threads = 1
log_level = "warn"
[bf16]
enabled = {bf16}
[optimizer.params]
lr = 0.003
betas = [0.9, 0.95]
eps = 1e-8
weight_decay = 0.1
[zero_optimization]
stage = {stage}
"""


def text(stage=3, micro=1, clip=1.0, bf16=False):
    return MANIFEST.format(stage=stage, micro=micro, clip=clip, bf16=str(bf16).lower())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2)) / math.sqrt(c // HEADS)
        future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        weights = weights.masked_fill(future, -math.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """checkpointing: None, "reentrant" or "nonreentrant". tied: the head is the token embedding."""

    def __init__(self, layers=3, tied=False, checkpointing=None, block=Block):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([block() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.checkpointing = checkpointing

    def forward(self, ids, targets=None):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


RANDOM = threading.Lock()  # torch's generator is one for all threads, and ranks are threads in most tests


def make(seed=1, **options):
    with RANDOM, torch.random.fork_rng():
        torch.manual_seed(seed)
        return GPT(**options)


def batch(step, rank=0, micro=0, device="cpu"):
    g = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    ids = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=g)
    ids[:, 1::2] = (ids[:, ::2][:, :ids[:, 1::2].shape[1]] * 7 + 3) % VOCABULARY  # something to learn
    ids = ids.to(device)
    return ids[:, :-1], ids[:, 1:]


def on_cuda(extra=(), world=1):
    """Overrides for a GPU per rank, with the optimizer where its state is."""
    extra = [*extra, "plugins.device=device_cuda"]
    if world > 1:
        extra.append("plugins.collective=comm_nccl")
    if not any("offload_optimizer" in line for line in extra):
        extra.append("plugins.optimizer=optim_adamw_cuda")
    return extra


def prepare(model, stage=3, extra=(), thread_rank=None, units=None, groups=None, **options):
    extra = list(extra)
    if stage == 3 and not any("persistence" in line for line in extra):
        extra.append("zero_optimization.param_persistence_threshold=0")
    return strata.torch.prepare(model, text=text(stage, **options), overrides=extra, thread_rank=thread_rank,
                                units=units, groups=groups)


def loop(model, engine, steps, micro=1, rank=0):
    """The user's loop; the losses of this rank."""
    losses = []
    for step in range(steps):
        for part in range(micro):
            loss = model(*batch(step, rank, part, engine.device))
            engine.backward(loss)
            losses.append(loss.item())
        engine.step()
    return losses


def train(stage=3, steps=30, micro=1, thread_rank=None, extra=(), bf16=False, clip=1.0, model=None, **model_options):
    model = model or make(**model_options)
    with prepare(model, stage, extra, thread_rank, micro=micro, bf16=bf16, clip=clip) as engine:
        losses = loop(model, engine, steps, micro, engine.rank)
        return losses, engine.state_dict()


class MasterAdamW:
    """Plain PyTorch: fp32 master weights and moments beside weights of any dtype."""

    def __init__(self, model, lr=0.003, betas=(0.9, 0.95), eps=1e-8, decay=0.1, clip=1.0):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.master = [p.detach().float().clone() for p in self.params]
        self.m = [torch.zeros_like(w) for w in self.master]
        self.v = [torch.zeros_like(w) for w in self.master]
        self.lr, self.betas, self.eps, self.decay, self.clip, self.t = lr, betas, eps, decay, clip, 0

    def step(self, divisor):
        """`divisor`: how many micro-batches, over all ranks, are summed up in the gradients."""
        self.t += 1
        grads = [torch.zeros_like(w) if p.grad is None else p.grad.float() / divisor
                 for p, w in zip(self.params, self.master)]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        factor = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
        b1, b2 = self.betas
        for p, w, m, v, g in zip(self.params, self.master, self.m, self.v, grads):
            g = g * factor
            m.mul_(b1).add_(g, alpha=1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            denominator = (v / (1 - b2**self.t)).sqrt().add_(self.eps)
            w.mul_(1 - self.lr * self.decay).addcdiv_(m / (1 - b1**self.t), denominator, value=-self.lr)
            p.data.copy_(w)
            p.grad = None
        return norm


def train_plainly(steps=30, micro=1, world=1, clip=1.0, model=None, bf16=False, order=None, device="cpu",
                  **model_options):
    """([rank 0's losses, ...], state dict), all in one process. `order` permutes the rows of every batch."""
    model = (model or make(**model_options)).to(device)
    optimizer = MasterAdamW(model, clip=clip)
    if bf16:
        model.bfloat16()
    losses = [[] for _ in range(world)]
    for step in range(steps):
        for part in range(micro):
            for rank in range(world):
                loss = model(*(rows[order] if order else rows for rows in batch(step, rank, part, device)))
                loss.backward()
                losses[rank].append(loss.item())
        optimizer.step(micro * world)
    return losses, model.state_dict()
