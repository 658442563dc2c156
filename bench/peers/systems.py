"""How each system makes a training step out of the same model: plain PyTorch, FSDP2, torchao, DeepSpeed, Strata.

A system has
    step()      one step of all micro-batches; the last one's loss, not waited for
    wait()      until nothing of it runs, on the device or the host
    facts()     {"engine_bytes": on the device outside torch's allocator, "pinned_bytes": of the host outside torch's,
                 and what else a row has of this system}, after wait()
    close()
All use AdamW with the same settings and clip the norm to the mode's, 1.0 unless it says otherwise.
"""
import pathlib

import torch
import torch.distributed as dist

import gpt
import jobs

LR, BETAS, EPS, DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.1
ADAMW = dict(lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)


class Place:
    """One rank of one row: what a system is made for. `folder` is for files, and gone after the row."""

    def __init__(self, job, mode, settings, device, rank, folder):
        self.job, self.mode, self.settings = job, mode, settings
        self.device, self.rank, self.folder = device, rank, pathlib.Path(folder)
        size = jobs.SIZES[job.size]
        self.data = gpt.batch(size, job.batch, device)
        self.model = gpt.make(size, device)

    @property
    def on_gpu(self):
        return self.device.type == "cuda"


class System:
    def __init__(self, place):
        self.place, self.model = place, place.model
        self.make()

    def backward(self):
        """All micro-batches; the last one's loss."""
        for _ in range(self.place.job.micro_batches):
            loss = self.model(*self.place.data)
            loss.div(self.place.job.micro_batches).backward()
        return loss.detach()

    def clip(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.place.mode.clip)

    def wait(self):
        if self.place.on_gpu:
            torch.cuda.synchronize()

    def facts(self):
        return {"engine_bytes": 0, "pinned_bytes": 0}

    def close(self):
        pass


class Plain(System):
    """Weights, gradients and moments in bf16."""

    def make(self):
        self.model.to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)

    def step(self):
        loss = self.backward()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class Plain32(System):
    """Weights and gradients in bf16, the optimizer's master and moments in fp32."""

    def make(self):
        params = list(self.model.parameters())
        self.master = [torch.nn.Parameter(p.detach().clone().float()) for p in params]
        self.model.to(torch.bfloat16)
        self.params = params
        self.optimizer = torch.optim.AdamW(self.master, **ADAMW)

    def step(self):
        loss = self.backward()
        self.clip()
        for p, w in zip(self.params, self.master):
            w.grad = p.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([p.data for p in self.params], [w.data for w in self.master])
        for p, w in zip(self.params, self.master):
            p.grad = w.grad = None
        return loss


class Torchao(Plain):
    """State in host memory, bf16 as the weights; it has no way to clip."""

    def make(self):
        from torchao.optim import CPUOffloadOptimizer
        self.model.to(torch.bfloat16)
        self.optimizer = CPUOffloadOptimizer(self.model.parameters(), torch.optim.AdamW, offload_gradients=False,
                                             **ADAMW)

    def clip(self):
        pass


class Fsdp(Plain):
    """Shards in fp32, computation and reductions in bf16."""

    def make(self, **policy):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.place.on_gpu else "gloo")
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in self.model.h:
            fully_shard(block, mp_policy=precision, **policy)
        fully_shard(self.model, mp_policy=precision, **policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)


class FsdpCpu(Fsdp):
    def make(self):
        from torch.distributed.fsdp import CPUOffloadPolicy
        super().make(offload_policy=CPUOffloadPolicy())


class DeepSpeed(System):
    """ZeRO-3."""

    def make(self):
        import deepspeed
        deepspeed.init_distributed("nccl" if self.place.on_gpu else "gloo")
        self.engine, *_ = deepspeed.initialize(model=self.model, model_parameters=self.model.parameters(),
                                               config=self.config())

    def config(self):
        job = self.place.job
        zero = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, **self.place.settings}
        for part in ("offload_optimizer", "offload_param"):
            if zero.get(part, {}).get("device") == "nvme":
                zero[part] = {**zero[part], "nvme_path": str(self.place.folder)}
        adamw = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY}
        return {"train_micro_batch_size_per_gpu": job.batch, "gradient_accumulation_steps": job.micro_batches,
                "gradient_clipping": self.place.mode.clip, "bf16": {"enabled": True}, "zero_optimization": zero,
                "optimizer": {"type": "AdamW", "params": adamw}, "steps_per_print": 10**9,
                "aio": {"block_size": 2**23, "queue_depth": 32, "thread_count": 2, "single_submit": False,
                        "overlap_events": True}}

    def step(self):
        for _ in range(self.place.job.micro_batches):
            loss = self.engine(*self.place.data)
            self.engine.backward(loss)
            self.engine.step()
        return loss.detach()


class Strata(System):
    def make(self):
        import strata.torch
        self.engine = strata.torch.prepare(self.model, text=self.manifest(), units=[gpt.Block])

    def manifest(self):
        job, offloads = self.place.job, self.place.settings.get(jobs.O + "device", "none") != "none"
        keys = {"train_micro_batch_size_per_gpu": job.batch, "gradient_accumulation_steps": job.micro_batches,
                "gradient_clipping": self.place.mode.clip, "steps_per_print": 0, "deadline_seconds": 120.0,
                "log_level": "info" if self.place.rank == 0 else "warn", "bf16.enabled": True,
                "optimizer.type": "AdamW", "optimizer.params.lr": LR, "optimizer.params.betas": list(BETAS),
                "optimizer.params.eps": EPS, "optimizer.params.weight_decay": DECAY, jobs.Z + "sub_group_size": 1e8}
        if self.place.on_gpu:
            keys["plugins.device"] = "device_cuda"
            keys["plugins.collective"] = "comm_nccl" if job.world > 1 else "comm_local"
            if not offloads:
                keys["plugins.optimizer"] = "optim_adamw_cuda"
        for part in (jobs.O, jobs.P):
            if self.place.settings.get(part + "device") == "nvme":
                keys[part + "nvme_path"] = str(self.place.folder)
        return "".join(f"{key} = {toml(value)}\n" for key, value in {**keys, **self.place.settings}.items())

    def step(self):
        for _ in range(self.place.job.micro_batches):
            loss = self.model(*self.place.data)
            self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def wait(self):
        self.engine.core.wait()
        super().wait()

    def facts(self):
        plan, counters = self.engine.core.plan(), self.engine.core.counters(last_step=True)
        lent = "lent"  # memory of torch's allocator, which counts it
        cpu = 1        # the tier's place in the counters
        state = {tier: sum(item.bytes for item in plan if item.what == "optimizer state" and item.tier == tier)
                 for tier in ("device", "cpu", "nvme")}
        return {"engine_bytes": sum(item.bytes for item in plan if item.tier == "device" and lent not in item.what),
                "pinned_bytes": pinned_bytes(plan, self.place.settings) if self.place.on_gpu else 0,
                "host_link_bytes": counters.tier_read[cpu] + counters.tier_write[cpu],
                "host_link_formula": jobs.host_link_bytes(self.place.job, self.place.settings,
                                                          state["device"] / sum(state.values()))}

    def close(self):
        self.engine.close()


def pinned_bytes(plan, settings):
    """What a plan's host memory has page-locked: all but the state that only the host updates."""
    share = jobs.share_of(settings)
    pinned = 0 if not settings.get(jobs.O + "pin_memory") else 1 if share is None else share
    return round(sum(item.bytes * (pinned if item.what == "optimizer state" else 1)
                     for item in plan if item.tier == "cpu"))


def toml(value):
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


SYSTEMS = {"plain": Plain, "plain32": Plain32, "torchao": Torchao, "fsdp": Fsdp, "fsdp_cpu": FsdpCpu,
           "deepspeed": DeepSpeed, "strata": Strata}
