#!/usr/bin/env python3
"""gpu_step.py: a training step of strata.torch on one GPU against plain PyTorch with an fp32 master, no offload.

The job is that of the peers' drivers: a GPT of 1.416 B params (GPT_SIZE=125m: 124 M; 3b: 3.26 B) in bf16, 8 x 1024
tokens, clip 1.0, checkpointed blocks. A step is 1/20 of 20 steps after 5, to the end of engine.wait(): work that still
runs counts. Each mode is a process of its own; `gpu_step.py MODE` prints one: plain, fsdp (WORLD_SIZE ranks), or
strata-STAGE-TIER with the tier of the optimizer state, none or cpu; overrides of the manifest (KEY=VALUE) may follow.
peak_gib is torch's peak, memory lent to the engine included, and what the engine holds beside that; in_use_gib is what
the driver says of the whole device at the end, with CUDA's own, NCCL's, and what torch's allocator keeps.
"""
import json
import os
import pathlib
import resource
import subprocess
import sys
import time

SIZES = {"125m": (768, 12, 12), "1.3b": (2048, 24, 16), "3b": (3072, 26, 24)}  # width, layers, heads
WIDTH, LAYERS, HEADS = SIZES[os.environ.get("GPT_SIZE", "1.3b")]
VOCABULARY, BATCH, LENGTH, WARM, STEPS, TARGET = 50304, int(os.environ.get("GPT_BATCH", 8)), 1024, 5, 20, 1.03
ADAMW = dict(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def model_class():
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.fc, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            b, t, _ = x.shape
            q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, WIDTH)
            x = x + self.proj(y)
            return x + self.fc2(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
            self.h = nn.ModuleList([Block() for _ in range(LAYERS)])
            self.lnf, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, x, y):
            h = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
            for block in self.h:
                h = checkpoint(block, h, use_reentrant=False)
            return F.cross_entropy(self.head(self.lnf(h)).flatten(0, 1).float(), y.flatten())

    return GPT, Block


def manifest(stage, tier, rank, world):
    text = (f"train_micro_batch_size_per_gpu = {BATCH}\ngradient_accumulation_steps = 1\ngradient_clipping = 1.0\n"
            f'steps_per_print = 0\nlog_level = "{"info" if rank == 0 else "warn"}"\ndeadline_seconds = 60.0\n'
            f'bf16.enabled = true\n[plugins]\ndevice = "device_cuda"\n'
            f'collective = "{"comm_nccl" if world > 1 else "comm_local"}"\n')
    if tier == "none":
        text += 'optimizer = "optim_adamw_cuda"\n'
    text += ('[optimizer]\ntype = "AdamW"\n[optimizer.params]\nlr = 1e-4\nbetas = [0.9, 0.95]\nweight_decay = 0.1\n'
             f"[zero_optimization]\nstage = {stage}\nsub_group_size = 1e8\n")
    if tier == "cpu":
        text += '[zero_optimization.offload_optimizer]\ndevice = "cpu"\npin_memory = true\n'
    return text


def plain_step(model, data):
    import torch
    params = list(model.parameters())
    master = [torch.nn.Parameter(p.detach().clone().float()) for p in params]
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(master, fused=True, **ADAMW)

    def step():
        loss = model(*data)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        for p, w in zip(params, master):
            w.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([p.data for p in params], [w.data for w in master])
        for p, w in zip(params, master):
            p.grad = w.grad = None
        return loss.detach()

    return step, torch.cuda.synchronize


def fsdp_step(model, data, rank, world):
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    dist.init_process_group("nccl", rank=rank, world_size=world)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.h:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def step():
        loss = model(*data)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, torch.cuda.synchronize


def strata_step(model, block, data, text, overrides):
    import torch

    import strata.torch
    engine = strata.torch.prepare(model, text=text, units=[block], overrides=overrides)

    def step():
        loss = model(*data)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    def wait():
        engine.core.wait()
        torch.cuda.synchronize()

    held = [item.bytes for item in engine.core.plan() if item.tier == "device" and "lent" not in item.what]
    return step, wait, sum(held)


def measure(mode, overrides=()):
    import torch
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    data = [torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=device) for _ in range(2)]
    torch.manual_seed(1)
    gpt, block = model_class()
    with torch.device(device):
        model = gpt()
    held = 0
    if mode == "plain":
        step, wait = plain_step(model, data)
    elif mode == "fsdp":
        step, wait = fsdp_step(model, data, rank, world)
    else:
        stage, tier = mode.split("-")[1:]
        step, wait, held = strata_step(model, block, data, manifest(stage, tier, rank, world), overrides)
    losses = [step() for _ in range(WARM)]
    wait()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    losses += [step() for _ in range(STEPS)]
    wait()
    seconds = (time.perf_counter() - began) / STEPS
    free, total = torch.cuda.mem_get_info()
    if rank == 0:
        print(json.dumps({"mode": mode, "world": world, "step_s": round(seconds, 4),
                          "peak_gib": round((torch.cuda.max_memory_allocated() + held) / 2**30, 2),
                          "of_the_engine": round(held / 2**30, 2), "in_use_gib": round((total - free) / 2**30, 2),
                          "host_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
                          "losses": [round(float(x), 6) for x in (*losses[:3], losses[-1])]}), flush=True)


def run(mode):
    root = pathlib.Path(__file__).resolve().parents[2]
    build = os.environ.get("STRATA_BUILD_DIR", str(root / "build/release"))
    env = {"STRATA_LIBRARY": f"{build}/lib/libstrata.so", **os.environ, "PYTHONPATH": str(root / "hosts/python")}
    lines = subprocess.run([sys.executable, __file__, mode], env=env, check=True, timeout=240, stdout=subprocess.PIPE,
                           text=True).stdout.strip().splitlines()
    print(lines[-1], flush=True)
    return json.loads(lines[-1])


def main():
    if len(sys.argv) > 1:
        return measure(sys.argv[1], sys.argv[2:])
    name = "gpu_no_offload_vs_plain"
    try:
        import torch
        reason = "" if torch.cuda.is_available() else "torch sees no GPU"
    except ImportError as error:
        reason = f"no torch in {sys.executable}: {error}"
    if reason:
        print(f"skipped: {reason}\n" + json.dumps({"name": name, "value": None, "skipped": reason}))
        sys.exit(77)
    plain, ours = run("plain"), run("strata-0-none")
    print(json.dumps({"name": name, "value": round(ours["step_s"] / plain["step_s"], 4), "target": TARGET, "unit": "x",
                      "better": "lower", "against": "plain PyTorch with an fp32 master, same machine",
                      "machine": torch.cuda.get_device_name(0)}))


if __name__ == "__main__":
    main()
