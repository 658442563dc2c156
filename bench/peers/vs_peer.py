#!/usr/bin/env python3
"""vs_peer.py NAME: a step of strata.torch on one GPU against that of a peer, both measured by this call.

    gpu_no_offload_vs_plain  no offload, against plain PyTorch with an fp32 master
    nvme_step_vs_deepspeed   optimizer state on disk, against DeepSpeed's pipelined; other rows of ours beside it

A row is a process of its own, as side_by_side.py measures it; jobs.py has the rows, their goals and the peer.
"""
import json
import sys

import jobs
import runner

# name: (job, the mode whose step over its goal's peer is the figure, further ones, seconds a row may take)
FIGURES = {"gpu_no_offload_vs_plain": ("none", "strata_0", (), 240),
           "nvme_step_vs_deepspeed": ("nvme", "strata_nvme", ("strata_nvme_sm", "strata_nvme_half"), 400)}


def goal(job, mode):
    """(times, the peer's mode)"""
    return next(row.goal.times for row in jobs.JOBS[job].rows if row.mode == mode)


def obstacle(machine, peer):
    needs, versions = jobs.MODES[peer].needs, machine["versions"]
    if not versions["torch"]:
        return f"no torch in {sys.executable}"
    if not machine["gpus"]:
        return "torch sees no GPU"
    return f"{needs} is not installed in {sys.executable}" if needs and not versions[needs] else ""


def measure(job, mode, seconds):
    figures = runner.run(job, mode, 1, [], seconds)
    print(json.dumps({"mode": mode, **figures}), flush=True)
    return figures


def main():
    name, machine = sys.argv[1], runner.describe_machine()
    job, mode, further, seconds = FIGURES[name]
    target, peer = goal(job, mode)
    result = {"name": name, "value": None, "target": target, "unit": "x", "better": "lower",
              "against": f"{jobs.MODES[peer].title}, same machine", "machine": machine["machine"]}
    if reason := obstacle(machine, peer):
        print(f"skipped: {reason}\n" + json.dumps({**result, "skipped": reason}))
        sys.exit(77)
    steps = {}
    for each in (peer, mode, *further):
        figures = measure(job, each, seconds)
        if "not_measured" not in figures:
            steps[each] = figures["step_s"]
        elif each not in further:
            sys.exit(f"{name}: {each}: {figures['not_measured']}")
    ratios = {each: round(step / steps[peer], 4) for each, step in steps.items() if each != peer}
    result["value"] = ratios.pop(mode)
    print(json.dumps({**result, **({"others": ratios} if ratios else {})}))


if __name__ == "__main__":
    main()
