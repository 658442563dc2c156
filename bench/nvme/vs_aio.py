"""vs_aio.py - offload_nvme against DeepSpeed's aio handle, in one process, on one disk: nvme_vs_deepspeed_aio.

    python3 vs_aio.py BUILD DIRECTORY

Both move files of the same size, 256 MiB, by direct I/O; the handle from and to memory that it has locked itself. First
a sweep over its settings, each tried twice, finds the best for reading and the best for writing; then the tier and the
handle at its best take turns in changing order. Each ratio is that of the medians; the figure is the smaller.

The tier's memory lies in huge pages, as device_host and offload_cpu give it to the engine, DeepSpeed's in pages of 4
KiB, as its users have it. How much of the figure is pages shows beside it: "in huge pages" is the handle at the same
settings after the kernel has been asked to put its memory into huge pages (MADV_COLLAPSE).

The Python in use needs torch and deepspeed (measured with 2.11.0 and 0.19.8); DeepSpeed compiles async_io at its first
use, with libaio (Debian: libaio-dev).
"""
import contextlib
import ctypes
import itertools
import json
import os
import statistics
import sys
import tempfile
import time

os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

from tier import KINDS, MB, Library, Tier, skip

NAME, TARGET, ROUNDS = "nvme_vs_deepspeed_aio", 0.97, 9
SWEEP = {"block_size": (128 << 10, 1 << 20, 8 << 20), "queue_depth": (8, 32, 128), "intra_op_parallelism": (1, 2, 4, 8),
         "single_submit": (False, True), "overlap_events": (False, True)}
MADV_COLLAPSE = 25


def load_aio():
    if not AsyncIOBuilder().is_compatible():
        skip(NAME, "DeepSpeed's async_io needs libaio's headers (package libaio-dev)")
    try:
        return AsyncIOBuilder().load(verbose=False)
    except (RuntimeError, OSError, ImportError) as error:
        skip(NAME, f"DeepSpeed's async_io could not be built: {str(error).splitlines()[0]}")


@contextlib.contextmanager
def no_output():
    """Compilers and the handle write to stdout, which is the figure's."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


class Handle:
    """DeepSpeed's side at one setting, with a file of its own."""

    def __init__(self, aio, settings, buffer, file):
        self.settings, self.buffer, self.file = settings, buffer, file
        self.aio = aio.aio_handle(*(settings[key] for key in ("block_size", "queue_depth", "single_submit",
                                                              "overlap_events", "intra_op_parallelism")))

    def rate(self, kind):
        move = self.aio.sync_pread if kind == "read" else self.aio.sync_pwrite
        begin = time.perf_counter()
        done = move(self.buffer, self.file, 0)
        took = time.perf_counter() - begin
        assert done == 1, f"{self.settings}: {kind} returned {done}"
        return self.buffer.numel() / took


def sweep(aio, buffer, file):
    """kind -> (the best settings, how many were tried)"""
    best = {kind: (0, None) for kind in KINDS}
    tried = list(itertools.product(*SWEEP.values()))
    for values in tried:
        handle = Handle(aio, dict(zip(SWEEP, values)), buffer, file)
        for kind in KINDS:
            best[kind] = max(best[kind], (max(handle.rate(kind) for _ in range(2)), handle.settings),
                             key=lambda each: each[0])
    print(f"DeepSpeed's aio, best of {len(tried)} settings:")
    for kind, (rate, settings) in best.items():
        print(f"  {kind:5} {rate / MB:6.0f} MB/s  {settings}")
    return {kind: settings for kind, (_, settings) in best.items()}


def in_huge_pages(buffer):
    return ctypes.CDLL(None).madvise(ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(buffer.numel()),
                                     MADV_COLLAPSE) == 0


def by_turns(contenders):
    """name -> the median rate"""
    rates = {name: [] for name in contenders}
    for turn in range(ROUNDS):
        names = list(contenders)
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            rates[name].append(contenders[name]())
    return {name: statistics.median(each) for name, each in rates.items()}


def measure(aio, library, folder):
    first = Handle(aio, {key: values[0] for key, values in SWEEP.items()}, None, None)
    empty = torch.empty(0, dtype=torch.uint8)
    buffer, collapsed = (first.aio.new_cpu_locked_tensor(library.bytes, empty) for _ in range(2))
    for each in (buffer, collapsed):
        each.copy_(torch.randint(0, 256, (library.bytes,), dtype=torch.uint8))
    huge = in_huge_pages(collapsed)
    file = os.path.join(folder, "deepspeed")
    first.buffer, first.file = buffer, file
    first.rate("write")
    best = sweep(aio, buffer, file)
    tier = Tier(library, folder)
    rates = {}
    for kind in KINDS:
        theirs = Handle(aio, best[kind], buffer, file)
        contenders = {"offload_nvme": lambda: tier.rate(kind), "DeepSpeed": lambda: theirs.rate(kind)}
        if huge:
            with_huge = Handle(aio, best[kind], collapsed, file)
            contenders["in huge pages"] = lambda: with_huge.rate(kind)
        rates[kind] = by_turns(contenders)
        print(f"{kind:5} " + ", ".join(f"{name} {rate / MB:.0f} MB/s" for name, rate in rates[kind].items()))
    tier.close()
    return rates, best


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: vs_aio.py BUILD DIRECTORY")
    library = Library(sys.argv[1])
    with no_output():
        aio = load_aio()
    with tempfile.TemporaryDirectory(prefix="bench-nvme-", dir=sys.argv[2]) as folder:
        rates, best = measure(aio, library, folder)
    over = lambda name: {kind: round(rates[kind]["offload_nvme"] / rates[kind][name], 3) for kind in KINDS
                         if name in rates[kind]}
    ratios = over("DeepSpeed")
    value = min(ratios.values())
    print(json.dumps({"name": NAME, "value": value, "target": TARGET, "pass": value >= TARGET, "unit": "x",
                      "better": "higher", **ratios, "over_huge_pages": over("in huge pages"),
                      "tier_mb_s": {kind: round(rates[kind]["offload_nvme"] / MB) for kind in KINDS},
                      "deepspeed_mb_s": {kind: round(rates[kind]["DeepSpeed"] / MB) for kind in KINDS},
                      "against": "DeepSpeed's aio handle at its best settings", "settings": best}))


main()
