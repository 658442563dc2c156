#!/usr/bin/env python3
"""What there is to measure on and with, as JSON: GPUs, CPU, memory, and the versions of the systems.

Run as a program of its own, so that its caller holds neither torch nor a GPU while rows are measured.
"""
import importlib.metadata
import json
import os
import platform
import socket

PACKAGES = ("torch", "deepspeed", "torchao")


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name():
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


def host_bytes():
    """What the control group allows, or all there is."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            return min(total, int(file.read()))
    except (OSError, ValueError):
        return total


def describe():
    gpus, ids = [], [socket.gethostname()]
    versions = {name: version(name) for name in PACKAGES}
    if versions["torch"]:
        import torch
        versions["torch"], versions["cuda"] = torch.__version__, torch.version.cuda
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        gpus, ids = [gpu.name for gpu in found], ids + [str(getattr(gpu, "uuid", "")) for gpu in found]
    cores, host = len(os.sched_getaffinity(0)), host_bytes()
    gpu_text = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU"
    return {"machine": f"{gpu_text}; {cpu_name()}, {cores} cores, {host / 2**30:.0f} GiB", "machine_id": " ".join(ids),
            "gpus": len(gpus), "host_bytes": host, "versions": versions}


if __name__ == "__main__":
    print(json.dumps(describe()))
