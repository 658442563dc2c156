"""vs_deepspeed.py - optim_adamw against DeepSpeed's cpu_adam, in one process, on all cores.

    python3 vs_deepspeed.py fp32_vs_deepspeed BUILD   fp32 gradients: one call of each
    python3 vs_deepspeed.py bf16_vs_deepspeed BUILD   bf16 gradient in, bf16 parameter out, fp32 master

BUILD is the build folder: lib/plugins/optim_adamw.so and bench/bench_adamw_python.so are taken from it. The Python in
use needs torch and deepspeed (measured with 2.11.0 and 0.19.8); DeepSpeed compiles cpu_adam at its first use.

DeepSpeed's way from bf16 gradient to bf16 parameter is three passes: cast the gradient to fp32, step on the fp32
master, cast the master to bf16. Each side works in the memory its system gives it: ours in huge pages, as offload_cpu
allocates, theirs in torch's own. How much of the figure is pages and how much is code shows when torch is told to use
huge pages too: set THP_MEM_ALLOC_ENABLE=1 (the JSON line then says so).

Rounds alternate; the figure is the median over rounds of DeepSpeed's time / ours. Before timing, both make the same
few steps and the results are compared. The last line is JSON.
"""
import ctypes
import json
import mmap
import os
import statistics
import sys
import time

os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

ELEMENTS = 61 << 20  # as bench_adamw.cc: not a power of two
ROUNDS = 15
F32, BF16 = 1, 2  # strata_dtype
SETTINGS = dict(lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)  # as in bench_adamw_step


class Plugin:
    """optim_adamw through the C functions of adamw_plugin.cc."""

    def __init__(self, build, layout, threads):
        self.c = ctypes.CDLL(os.path.join(build, "bench", "bench_adamw_python.so"))
        self.c.bench_adamw_open.restype = ctypes.c_void_p
        self.c.bench_adamw_open.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint]
        self.c.bench_adamw_step.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p,
                                            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64]
        library = os.path.join(build, "lib", "plugins", "optim_adamw.so")
        self.instance = self.c.bench_adamw_open(library.encode(), layout.encode(), threads)

    def step(self, grad, weight, state, step):
        dtype = lambda t: F32 if t.dtype == torch.float32 else BF16
        pointers = (ctypes.c_void_p * 3)(*[t.data_ptr() for t in state])
        self.c.bench_adamw_step(self.instance, dtype(grad), dtype(weight), grad.data_ptr(), weight.data_ptr(),
                                pointers, grad.numel(), step)


def huge(tensor):
    """A copy of the tensor in huge pages."""
    pages = mmap.mmap(-1, tensor.numel() * tensor.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=tensor.dtype).copy_(tensor)  # keeps `pages` alive


class Job:
    """One side each: ours and theirs are functions of the step number; both masters start equal."""

    def __init__(self, build, half, count, threads):
        torch.manual_seed(1)
        dtype = torch.bfloat16 if half else torch.float32
        master = torch.randn(count) * 0.02
        self.half = half
        # Theirs, in torch's memory.
        self.their_grad = (torch.randn(count) * 0.01).to(dtype)
        self.param = torch.nn.Parameter(master.clone())
        self.param.grad = torch.empty(count) if half else self.their_grad
        self.their_weight = master.to(dtype) if half else None
        self.adam = DeepSpeedCPUAdam([self.param], adamw_mode=True, **SETTINGS)
        # Ours, in huge pages. With fp32 weights the weight is the master.
        self.plugin = Plugin(build, "whole" if half else "split", threads)
        self.grad = huge(self.their_grad)
        self.master = huge(master)
        self.weight = huge(master.to(dtype)) if half else self.master
        self.moments = [huge(torch.zeros(count)), huge(torch.zeros(count))]

    def ours(self, step):
        self.plugin.step(self.grad, self.weight, ([self.master] if self.half else []) + self.moments, step)

    def theirs(self, _):
        if self.half:
            self.param.grad.copy_(self.their_grad)
        self.adam.step()
        if self.half:
            self.their_weight.copy_(self.param.data)


def check(build, half, threads):
    job = Job(build, half, 100_003, threads)
    for step in range(1, 6):
        job.ours(step)
        job.theirs(step)
    worst = (job.master - job.param.data).abs().max().item()
    assert worst < 1e-6, f"after 5 steps the masters differ by {worst}"


def seconds(f, step):
    begin = time.perf_counter()
    f(step)
    return time.perf_counter() - begin


def cpu_model():
    with open("/proc/cpuinfo") as info:
        for line in info:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "unknown CPU"


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in ("fp32_vs_deepspeed", "bf16_vs_deepspeed"):
        sys.exit("usage: vs_deepspeed.py fp32_vs_deepspeed|bf16_vs_deepspeed BUILD")
    half, build = sys.argv[1].startswith("bf16"), sys.argv[2]
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    check(build, half, threads)
    job = Job(build, half, ELEMENTS, threads)
    times = []
    for step in range(1, ROUNDS + 2):
        times.append((seconds(job.ours, step), seconds(job.theirs, step)))
    times = times[1:]  # the first round warms up
    for name, k in (("optim_adamw", 0), ("DeepSpeed", 1)):
        print(f"{name:12} {ELEMENTS / statistics.median(t[k] for t in times) / 1e9:.3f} G elements/s")
    pages = "huge pages too" if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1" else "torch's memory"
    against = f"DeepSpeed cpu_adam{' (cast, step, cast)' if half else ''} in {pages}"
    print(json.dumps({"name": f"adamw_{'bf16' if half else 'fp32'}_vs_deepspeed",
                      "value": round(statistics.median(t[1] / t[0] for t in times), 3),
                      "target": 1.9 if half else 1.2, "unit": "ratio", "better": "higher", "against": against,
                      "machine": f"{cpu_model()}, {threads} cores"}))


main()
