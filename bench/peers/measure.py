#!/usr/bin/env python3
"""One rank of one row: measure.py JOB MODE [KEY=VALUE ...] trains and writes its figures as JSON.

KEY=VALUE are further settings of the mode, values as in TOML, for trying out. Ranks have torchrun's environment; Strata
and plain PyTorch run without it, too. A step is timed in one way for every system: 1/steps of `steps` steps after the
warm-up, from the first call until nothing of them runs any more, the update included; no step is waited for by itself.
"""
import argparse
import json
import os
import pathlib
import resource
import sys
import tempfile
import time
import tomllib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import torch

import jobs
import runner
from systems import SYSTEMS, Place

PROBE = 64 * 2**20


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def pinned_is_resident():
    """Whether the system counts page-locked memory among what a process has resident: drivers differ."""
    before = resident()
    memory = torch.empty(PROBE, dtype=torch.uint8, pin_memory=True).fill_(1)
    grown = resident() - before
    del memory
    return grown > PROBE // 2


def host_bytes(on_gpu, pinned_counts, pinned_of_engine):
    """Peak of this process: resident, and what it has page-locked beside that."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if not on_gpu or pinned_counts:
        return peak
    return peak + pinned_of_engine + torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)


def measure(job, mode, settings, warm, steps, folder):
    rank, on_gpu = int(os.environ.get("RANK", 0)), job.gpus > 0
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    pinned_counts = on_gpu and pinned_is_resident()
    began = time.perf_counter()
    system = SYSTEMS[mode.system](Place(job, mode, settings, device, rank, folder))
    system.wait()
    prepared = time.perf_counter()
    losses = [system.step() for _ in range(warm)]
    system.wait()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    first = time.perf_counter()
    losses += [system.step() for _ in range(steps)]
    system.wait()
    seconds = (time.perf_counter() - first) / steps
    facts = system.facts()
    engine, pinned = facts.pop("engine_bytes"), facts.pop("pinned_bytes")
    size = jobs.SIZES[job.size]
    row = {"step_s": round(seconds, 4),
           "tokens_s": round(job.batch * size.length * job.micro_batches * job.world / seconds),
           "peak_gib": None, "engine_gib": round(engine / 2**30, 3), "in_use_gib": None,
           "host_gib": round(host_bytes(on_gpu, pinned_counts, pinned) / 2**30, 2),
           "losses": [round(float(loss), 6) for loss in losses[:3]], "loss": round(float(losses[-1]), 6),
           "loss_after": len(losses), "params": sum(p.numel() for p in system.model.parameters()),
           "init_s": round(prepared - began, 1), **facts}
    if on_gpu:
        free, total = torch.cuda.mem_get_info()
        row["peak_gib"] = round((torch.cuda.max_memory_allocated() + engine) / 2**30, 2)
        row["in_use_gib"] = round((total - free) / 2**30, 2)
    return system, row


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", choices=jobs.JOBS)
    parser.add_argument("mode", choices=jobs.MODES)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--warm", type=jobs.at_least(0), help="steps before the measured ones; the job's if not given")
    parser.add_argument("--steps", type=jobs.at_least(1), help="measured steps; the job's if not given")
    parser.add_argument("--out", type=pathlib.Path, help="file for the figures; standard output if not given")
    parser.add_argument("--folder", help="for what the run keeps on disk; a temporary one if not given")
    return parser.parse_args()


def say(args, what):
    if not args.out:
        return print(json.dumps(what), flush=True)
    part = args.out.with_suffix(".part")
    part.write_text(json.dumps(what))
    part.rename(args.out)


def main():
    args = arguments()
    os.environ.update(runner.environment())  # also without the caller of the ranks
    sys.path.insert(0, str(runner.ROOT / "hosts" / "python"))
    job, mode = jobs.JOBS[args.job], jobs.MODES[args.mode]
    row = next((row for row in job.rows if row.mode == args.mode), jobs.Row(args.mode, 0))
    given = tomllib.loads("\n".join(f'"{key}" = {value}' for key, value in (x.split("=", 1) for x in args.settings)))
    warm, steps = job.warm if args.warm is None else args.warm, args.steps or job.steps
    with tempfile.TemporaryDirectory() as folder:
        try:
            system, figures = measure(job, mode, {**jobs.settings_of(row), **given}, warm, steps, args.folder or folder)
        except Exception as error:
            say(args, {"not_measured": f"{type(error).__name__}: {error}"})
            raise
        say(args, figures)
        system.close()
    sys.stdout.flush()
    os._exit(0)  # the figures are out; how long a library takes to end its threads and groups is not asked


if __name__ == "__main__":
    main()
