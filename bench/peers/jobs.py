"""What side_by_side.py measures: a table of jobs, each with the modes that do it side by side, and the goals.

A job is a model, a batch and a number of GPUs. A mode is one system set up in one way, and says what makes it another
job than the rest, if anything does. Rows of a job are measured in the order they stand here, so that a job's peers are
measured beside ours. Standard library only: the caller of the rows never loads torch.
"""
import argparse
import dataclasses

Z, O, P = "zero_optimization.", "zero_optimization.offload_optimizer.", "zero_optimization.offload_param."
SPLIT, SHARE, BUDGET, RATIO = (O + name for name in ("split_update", "split_share", "device_state_budget", "ratio"))
LAYOUT = "optimizer.params.state_layout"
# Goals of host memory: bytes a param for state and gradient, for its weight, for what an fp32 sum of gradients takes
# beyond one of them; and GiB a rank for all the rest of the process.
HOST_STATE, HOST_WEIGHT, HOST_SUM, HOST_BESIDE = 14, 2, 2, 2


@dataclasses.dataclass(frozen=True)
class Size:
    """A GPT of gpt.py."""
    width: int
    layers: int
    heads: int
    vocabulary: int = 50304
    length: int = 1024

    @property
    def params(self):
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (2 * self.vocabulary + self.length + 2) * self.width

    @property
    def uses(self):
        """Elements that a micro-batch gathers: a block's matrices for the forward and to compute it again, embeddings
        and head once. Biases and norms are below param_persistence_threshold, and stay.
        """
        return (24 * self.layers * self.width + 2 * self.vocabulary + self.length) * self.width

    @property
    def resident(self):
        return (13 * self.layers + 2) * self.width


SIZES = {
    "tiny": Size(128, 2, 4, 512, 64),
    "124m": Size(768, 12, 12),
    "1.4b": Size(2048, 24, 16),
    "3.3b": Size(3072, 26, 24),
    "6.9b": Size(4096, 32, 32),
    "8b": Size(4096, 38, 32),
}


@dataclasses.dataclass(frozen=True)
class Mode:
    """`settings`: Strata's manifest keys, or DeepSpeed's keys of zero_optimization."""
    title: str
    system: str                 # a class of systems.py
    settings: dict = dataclasses.field(default_factory=dict)
    needs: str = ""             # the Python package of the peer
    host_bytes: float = 0       # of host memory per param that a peer is known to take; Strata plans its own
    clip: float = 1.0
    other_job: str = ""         # why its step is not that of the other modes; such a peer is never the best one

    @property
    def is_ours(self):
        return self.system == "strata"


@dataclasses.dataclass(frozen=True)
class Goal:
    """At most: seconds a step, or this many times the step of a peer in the same job; GiB."""
    step_s: float = None
    times: tuple = None         # (factor, mode)
    peak_gib: float = None
    host_gib: float = None


@dataclasses.dataclass(frozen=True)
class Row:
    mode: str
    expected: float             # seconds a step, to plan by
    goal: Goal = None
    settings: dict = dataclasses.field(default_factory=dict)  # over the mode's


@dataclasses.dataclass(frozen=True)
class Job:
    title: str
    size: str
    rows: tuple
    batch: int = 8
    micro_batches: int = 1
    gpus: int = 1               # 0: on the CPU
    warm: int = 5
    steps: int = 20

    @property
    def world(self):
        return max(self.gpus, 1)


def deepspeed(title, settings, host_bytes, **more):
    return Mode("DeepSpeed, " + title, "deepspeed", settings, "deepspeed", host_bytes, **more)


def strata(title, settings):
    return Mode("Strata, " + title, "strata", settings)


CPU = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "pin_memory": True, "fast_init": False}
# Buckets that suit these models better than DeepSpeed's defaults in most of its modes.
BUCKETS = {"reduce_bucket_size": int(5e7), "sub_group_size": int(1e8), "stage3_prefetch_bucket_size": int(5e7),
           "stage3_param_persistence_threshold": int(1e5), "stage3_max_live_parameters": int(1e9),
           "stage3_max_reuse_distance": int(1e9)}
NVME_PARAMS = {"device": "nvme", "pin_memory": True, "buffer_count": 8, "buffer_size": int(2.2e8), "max_in_cpu": 0}

TIGHT = {Z + "stage": 3, Z + "max_live_parameters": 3e8, Z + "max_reuse_distance": 0, Z + "reduce_bucket_size": 1e8}
STATE_ON_CPU = {**TIGHT, O + "device": "cpu", O + "pin_memory": True}
ALL_ON_CPU = {**STATE_ON_CPU, P + "device": "cpu", P + "pin_memory": True}
STATE_ON_NVME = {**TIGHT, O + "device": "nvme"}
SPLIT_MASTER = {LAYOUT: "split"}
AUTO = {SPLIT: True}  # a measured share

MODES = {
    "plain": Mode("plain PyTorch, AdamW in bf16", "plain", other_job="no fp32 master"),
    "plain32": Mode("plain PyTorch, fp32 master", "plain32"),
    "fsdp": Mode("FSDP2", "fsdp"),
    "fsdp_cpu": Mode("FSDP2, CPU offload", "fsdp_cpu", host_bytes=18),
    "torchao": Mode("torchao CPUOffloadOptimizer", "torchao", needs="torchao", host_bytes=8,
                    other_job="state in bf16, no clip"),
    "ds_none": deepspeed("no offload", BUCKETS, 0),
    "ds_nonedef": deepspeed("no offload, default buckets", {}, 0),
    "ds_opt": deepspeed("optimizer on CPU", {**BUCKETS, "offload_optimizer": CPU}, 19),
    "ds_def": deepspeed("optimizer on CPU, default buckets", {"offload_optimizer": CPU}, 19),
    "ds_ratio": deepspeed("optimizer on CPU, ratio 0.5", {"offload_optimizer": {**CPU, "ratio": 0.5}}, 10),
    "ds_super": deepspeed("SuperOffload, clip off", {"offload_optimizer": {
        **CPU, "super_offload": True, "ratio": 1.0, "cpuadam_cores_perc": 0.9}}, 17, clip=0.0, other_job="no clip"),
    "ds_optparam": deepspeed("params and optimizer on CPU", {
        **BUCKETS, "offload_optimizer": CPU, "offload_param": CPU}, 26),
    "ds_nvme": deepspeed("optimizer on NVMe", {**BUCKETS, "offload_optimizer": {**NVME, "buffer_count": 4}}, 8),
    "ds_nvmepipe": deepspeed("optimizer on NVMe, pipelined", {**BUCKETS, "offload_optimizer": {
        **NVME, "buffer_count": 20, "pipeline_read": True, "pipeline_write": True}}, 17),
    "ds_nvmeall": deepspeed("params and optimizer on NVMe", {
        **BUCKETS, "offload_optimizer": {**NVME, "buffer_count": 4}, "offload_param": NVME_PARAMS}, 8),
    "strata_0": strata("stage 0", {Z + "stage": 0}),
    "strata_0_split": strata("stage 0, split master", {Z + "stage": 0, **SPLIT_MASTER}),
    "strata_3": strata("stage 3", {Z + "stage": 3}),
    "strata_3_tight": strata("stage 3, split master, few live params", {**TIGHT, **SPLIT_MASTER}),
    "strata_opt": strata("optimizer on CPU", STATE_ON_CPU),
    "strata_opt_sm": strata("optimizer on CPU, split master", {**STATE_ON_CPU, **SPLIT_MASTER}),
    "strata_opt_split": strata("optimizer on CPU, split update", {**STATE_ON_CPU, **AUTO}),
    "strata_opt_split_sm": strata("optimizer on CPU, split update, split master",
                                  {**STATE_ON_CPU, **AUTO, **SPLIT_MASTER}),
    "strata_opt_share": strata("optimizer on CPU, split update, share 0.4", {**STATE_ON_CPU, **AUTO, SHARE: 0.4}),
    # What the peak has left over the modes without a budget: 8.1 GiB, 8.5 with buffers of streamed state.
    "strata_opt_16": strata("optimizer on CPU, budget for a peak of 16 GiB", {**STATE_ON_CPU, **AUTO, BUDGET: 8.0e9}),
    "strata_opt_24": strata("optimizer on CPU, budget for a peak of 24 GiB", {**STATE_ON_CPU, **AUTO, BUDGET: 16.0e9}),
    "strata_opt_ratio": strata("optimizer on CPU, ratio 0.5", {**STATE_ON_CPU, RATIO: 0.5}),
    "strata_optparam": strata("params and optimizer on CPU", ALL_ON_CPU),
    "strata_optparam_split": strata("params and optimizer on CPU, split update", {**ALL_ON_CPU, **AUTO}),
    "strata_optparam_sm": strata("params and optimizer on CPU, split master", {**ALL_ON_CPU, **SPLIT_MASTER}),
    "strata_optparam_split_sm": strata("params and optimizer on CPU, split update, split master",
                                       {**ALL_ON_CPU, **AUTO, **SPLIT_MASTER}),
    "strata_nvme": strata("optimizer on NVMe", STATE_ON_NVME),
    "strata_nvme_sm": strata("optimizer on NVMe, split master", {**STATE_ON_NVME, **SPLIT_MASTER}),
    # Half of 12 bytes each of 1.416e9 params.
    "strata_nvme_half": strata("optimizer on NVMe, half of it kept in host RAM",
                               {**STATE_ON_NVME, O + "cpu_state_budget": 8.5e9}),
    "strata_nvmeall": strata("params and optimizer on NVMe", {
        **STATE_ON_NVME, P + "device": "nvme", P + "max_in_cpu": 0}),
}

# A block of these models has 2e8 params. Machines whose memory grows with its use show a part of it at the start.
LARGE_UNITS = {Z + "max_live_parameters": 6e8, "host_memory_limit": int(134e9)}
NOT_PINNED = {O + "pin_memory": False}
ALL_NOT_PINNED = {**NOT_PINNED, P + "pin_memory": False}

JOBS = {
    "none": Job("no offload", "1.4b", (
        Row("plain", 0.17), Row("plain32", 0.18), Row("strata_0", 0.19, Goal(times=(1.03, "plain32"))),
        Row("strata_0_split", 0.19, Goal(times=(1.03, "plain32"))), Row("fsdp", 0.22), Row("strata_3", 0.2),
        Row("ds_none", 0.43), Row("ds_nonedef", 0.45))),
    "optimizer": Job("optimizer state on the CPU", "1.4b", (
        Row("strata_opt", 0.6, Goal(0.50)), Row("ds_opt", 1.6), Row("ds_def", 1.6),
        Row("strata_opt_split", 0.5, Goal(0.42, peak_gib=10)), Row("strata_opt_share", 0.5, Goal(0.42, peak_gib=10)),
        Row("torchao", 0.4), Row("strata_opt_16", 0.4, Goal(0.32, peak_gib=16)), Row("ds_ratio", 0.8),
        Row("strata_opt_ratio", 0.4), Row("strata_opt_24", 0.3, Goal(0.20, peak_gib=24)), Row("strata_opt_sm", 0.6),
        Row("strata_opt_split_sm", 0.5), Row("ds_super", 2.3))),
    "params": Job("params and optimizer state on the CPU", "1.4b", (
        Row("strata_optparam", 0.8, Goal(0.55)), Row("ds_optparam", 1.15),
        Row("strata_optparam_split", 0.7, Goal(0.47)), Row("strata_optparam_sm", 0.8), Row("fsdp_cpu", 1.7))),
    "micro4": Job("optimizer state on the CPU, 4 micro-batches", "1.4b", (
        Row("strata_opt", 1.4, Goal(1.05)), Row("ds_opt", 3.0), Row("strata_opt_split", 1.2, Goal(1.05))),
        micro_batches=4),
    "none_2": Job("no offload", "1.4b", (
        Row("fsdp", 0.19), Row("strata_3_tight", 0.19, Goal(times=(1.0, "fsdp")), {Z + "max_live_parameters": 1.4e8}),
        Row("strata_3", 0.19), Row("ds_none", 0.33)), gpus=2),
    "none_2_3b": Job("no offload", "3.3b", (
        Row("fsdp", 0.4), Row("strata_3_tight", 0.4, Goal(times=(1.0, "fsdp"))), Row("ds_none", 0.52)), gpus=2),
    "optimizer_2": Job("optimizer state on the CPU", "1.4b", (
        Row("strata_opt", 0.6, Goal(0.45)), Row("ds_opt", 3.1), Row("strata_opt_split", 0.5, Goal(0.45)),
        Row("fsdp_cpu", 1.7)), gpus=2),
    "params_2": Job("params and optimizer state on the CPU", "1.4b", (
        Row("strata_optparam", 0.7), Row("ds_optparam", 2.5)), gpus=2),
    "optimizer_7b": Job("optimizer state on the CPU", "6.9b", (
        Row("strata_opt", 3.0, Goal(2.2, host_gib=104), LARGE_UNITS), Row("ds_opt", 9.0),
        Row("strata_opt_split", 2.5, Goal(2.2, host_gib=104), LARGE_UNITS)), batch=2, warm=3, steps=8),
    "params_8b": Job("params and optimizer state on the CPU", "8b", (
        Row("strata_optparam_sm", 5.0, Goal(host_gib=128), LARGE_UNITS), Row("ds_optparam", 9.0),
        Row("strata_optparam_split_sm", 5.0, Goal(host_gib=128), LARGE_UNITS)), batch=2, warm=3, steps=8),
    "nvme": Job("optimizer state on NVMe", "1.4b", (
        Row("strata_nvme", 20, Goal(times=(0.95, "ds_nvmepipe"))), Row("ds_nvmepipe", 23),
        Row("strata_nvme_sm", 16, Goal(times=(0.80, "ds_nvmepipe"))),
        Row("strata_nvme_half", 10, Goal(times=(0.50, "ds_nvmepipe"))), Row("strata_nvmeall", 22), Row("ds_nvme", 27),
        Row("ds_nvmeall", 30)), warm=2, steps=3),
    "tiny": Job("a small model, for trying this program without a GPU", "tiny", (
        Row("plain", 0.05), Row("plain32", 0.05), Row("strata_0", 0.05), Row("fsdp", 0.1), Row("strata_3", 0.05),
        Row("strata_opt", 0.05, Goal(times=(2.0, "ds_opt")), NOT_PINNED), Row("ds_opt", 0.1),
        Row("strata_opt_sm", 0.05, None, NOT_PINNED), Row("strata_optparam", 0.05, None, ALL_NOT_PINNED),
        Row("strata_nvme", 0.05), Row("torchao", 0.1)), batch=2, gpus=0),
}


def at_least(least):
    """What argparse takes for a count that has a least value."""
    def count(text):
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return number
    return count


def settings_of(row):
    return {**MODES[row.mode].settings, **row.settings}


def host_goal_gib(job, settings):
    """What all ranks of a row of ours may take of host memory where all of its state lies there; None elsewhere.

    Also None without a GPU: what is on the device is in host memory then, too.
    """
    partly = settings.get(BUDGET) or settings.get(RATIO) or settings.get(P + "device") == "nvme"
    if job.gpus == 0 or partly or settings.get(O + "device") != "cpu":
        return None
    a_param = HOST_STATE + (HOST_WEIGHT if settings.get(P + "device") == "cpu" else 0)
    a_param += HOST_SUM if job.micro_batches > 1 else 0
    return a_param * SIZES[job.size].params / 2**30 + HOST_BESIDE * job.world


def goal_of(job_name, mode):
    """The goal of a row, with what its settings allow of host memory where that is less than the table says."""
    job = JOBS[job_name]
    row = next((row for row in job.rows if row.mode == mode), None)
    most = host_goal_gib(job, settings_of(row)) if row and MODES[mode].is_ours else None
    if most is None:
        return row and row.goal
    goal = row.goal or Goal()
    return dataclasses.replace(goal, host_gib=min(most, goal.host_gib or most))


def title_of(job):
    """A job in words."""
    size = SIZES[job.size]
    count = f"{size.params / 1e9:.3f} B" if size.params > 1e9 else f"{size.params / 1e6:.2f} M"
    where = "CPU" if job.gpus == 0 else f"{job.gpus} GPU{'s' if job.gpus > 1 else ''}"
    micro = f" and {job.micro_batches} micro-batches" if job.micro_batches > 1 else ""
    return f"{count} params, {job.batch} x {size.length} tokens{micro} a rank, {where}, {job.title}"


def share_of(settings):
    """Of the state in host memory, what the GPU updates, as the settings fix it; None: it is measured."""
    return settings.get(SHARE) if settings.get(SPLIT) else 0.0


def host_link_bytes(job, settings, on_device=0.0):
    """Bytes that one rank's GPU and host memory exchange in a step, by the formula. None where none is stated.

    `on_device`: how much of the state the GPU keeps, of 1. docs/offload.md has the formula in words.
    """
    state_in, weights_in, share = settings.get(O + "device"), settings.get(P + "device"), share_of(settings)
    if "nvme" in (state_in, weights_in) or share is None:
        return None
    if state_in != "cpu":
        return 0
    size, split = SIZES[job.size], settings.get(LAYOUT) == "split"
    params_on_cpu = weights_in == "cpu"
    if params_on_cpu and (on_device > 0 or size.width**2 <= 1e5):  # of which units, and all of them stay
        return None
    if job.micro_batches > 1 and settings.get(BUDGET):  # of which units sums stay
        return None
    fetched = 2 * size.uses * job.micro_batches if params_on_cpu else 0
    updated = 0
    for params, weight_there in ((size.resident, False), (size.params - size.resident, params_on_cpu)):
        updated += params * (1 - on_device) * crossing(job.micro_batches, split, share, weight_there, job.world)
    return round((fetched + updated) / job.world)


def crossing(micro_batches, split_master, share, weight_there, ranks=1):
    """Bytes that the update of one param sends over the link, both ways together, where its state lies in host memory.

    Several micro-batches are added up there: each sends the gradient as it was reduced, by a rank alone as it was sent,
    and what the GPU updates takes the fp32 sum back. `weight_there`: the param's weight does, too.
    """
    state, weight = (10 if split_master else 12), 2
    sent = 2 if micro_batches == 1 else micro_batches * (2 if ranks == 1 else 4)  # reduced on the GPU in any case
    by_host, by_gpu = sent, sent + (2 if micro_batches == 1 else 4) + 2 * state
    if weight_there:
        by_gpu += weight * (2 if split_master else 1)   # the new one back; the old one is half of a split master
    else:
        by_host += weight * (2 if split_master else 1)  # the same the other way
    return (1 - share) * by_host + share * by_gpu
