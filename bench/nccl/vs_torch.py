#!/usr/bin/env python3
"""vs_torch.py allgather|reducescatter: comm_nccl against torch.distributed's NCCL, 2 processes with a GPU each.

Both use the libnccl that torch has loaded, the same tensors (bf16, of torch's allocator) and one stream, in turns of 20
calls timed by CUDA events; the ratio is that of the medians, and the figure is the worst of the sizes. Results are
compared bit by bit first. "registered" is the same with memory of comm_nccl's own alloc.
"""
import ctypes
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys

SIZES = (4, 64, 512)  # MiB of the whole buffer
ROUNDS, CALLS, TARGET = 9, 20, 0.95


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def load_bench():
    lib = ctypes.CDLL(str(pathlib.Path(os.environ["STRATA_BUILD_DIR"]) / "bin" / "bench_nccl.so"))
    lib.bench_open.restype = lib.bench_alloc.restype = ctypes.c_void_p
    lib.bench_alloc.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
    lib.bench_run.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64,
                              ctypes.c_void_p, ctypes.c_int)
    lib.bench_close.argtypes = (ctypes.c_void_p,)
    return lib


class Memory:
    """Memory of the plugin as torch takes it in."""
    def __init__(self, pointer, bytes_):
        self.__cuda_array_interface__ = {"data": (pointer, False), "shape": (bytes_,), "typestr": "|u1", "version": 3}


def measure(name):
    import torch
    import torch.distributed as dist
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    dist.barrier()
    lib = load_bench()
    bench = lib.bench_open()
    reduce = int(name == "reducescatter")
    stream = torch.cuda.Stream()
    figures = {}
    with torch.cuda.stream(stream):
        for mib in SIZES:
            whole = mib * 2**20 // 2

            def pair(own):
                if own:
                    flat = torch.as_tensor(Memory(lib.bench_alloc(bench, 3 * whole), 3 * whole), device="cuda")
                    flat = flat.view(torch.bfloat16)
                else:
                    flat = torch.empty(3 * whole // 2, dtype=torch.bfloat16, device="cuda")
                flat.normal_()
                large, small = flat[:whole], flat[whole:]
                return (large, small) if reduce else (small, large)

            def ours(tensors, times):
                lib.bench_run(bench, reduce, tensors[0].data_ptr(), tensors[1].data_ptr(), whole // 2,
                              stream.cuda_stream, times)

            def torchs(tensors, times):
                for _ in range(times):
                    if reduce:
                        dist.reduce_scatter_tensor(tensors[1], tensors[0])
                    else:
                        dist.all_gather_into_tensor(tensors[1], tensors[0])

            def timed(run, tensors):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                dist.barrier()
                begin.record()
                run(tensors, CALLS)
                end.record()
                torch.cuda.synchronize()
                return begin.elapsed_time(end) * 1000 / CALLS

            shared, own = pair(False), pair(True)
            torchs(shared, 5)
            want = shared[1].clone()
            shared[1].zero_()
            ours(shared, 5)
            torch.cuda.synchronize()
            if not torch.equal(want.view(torch.int16), shared[1].view(torch.int16)):
                sys.exit(f"{mib} MiB: the results differ")
            ours(own, 5)
            times = {"torch": [], "ours": [], "registered": []}
            for _ in range(ROUNDS):
                times["torch"].append(timed(torchs, shared))
                times["ours"].append(timed(ours, shared))
                times["registered"].append(timed(ours, own))
            median = {key: statistics.median(values) for key, values in times.items()}
            figures[mib] = {"ratio": round(median["torch"] / median["ours"], 3),
                            "registered_ratio": round(median["torch"] / median["registered"], 3),
                            **{f"{key}_us": round(value, 1) for key, value in median.items()},
                            "GB_s": round(whole / median["ours"] / 1000, 1)}
            if rank == 0:
                print(f"{name} {mib} MiB: {figures[mib]}", flush=True)
    torch.cuda.synchronize()
    lib.bench_close(bench)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps({"name": f"nccl_{name}_vs_torch", "value": min(f["ratio"] for f in figures.values()),
                          "unit": "x", "target": TARGET,
                          **{f"{key}_{mib}MiB": value for mib, f in figures.items() for key, value in f.items()}}))


def skip(name, reason):
    print(f"skipped: {reason}")
    print(json.dumps({"name": f"nccl_{name}_vs_torch", "value": None, "skipped": reason}))
    sys.exit(77)


def main():
    name = sys.argv[1]
    if "RANK" in os.environ:
        return measure(name)
    try:
        import torch
    except ImportError as error:
        skip(name, f"no torch in {sys.executable}: {error}")
    if torch.cuda.device_count() < 2:
        skip(name, f"2 GPUs are needed, {torch.cuda.device_count()} are visible")
    if not (pathlib.Path(os.environ["STRATA_BUILD_DIR"]) / "bin" / "bench_nccl.so").exists():
        skip(name, f"{os.environ['STRATA_BUILD_DIR']} has no bench_nccl: built without a CUDA compiler or nccl.h")
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
              "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0")}
    ranks = [subprocess.Popen([sys.executable, __file__, name],
                              env={**os.environ, **common, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)]
    try:
        codes = [rank.wait(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
