#!/usr/bin/env python3
"""vs_peer.py NAME: a step of strata.torch on one GPU against that of a peer, both measured by this call.

    gpu_no_offload_vs_plain  no offload, against plain PyTorch with an fp32 master
    nvme_step_vs_deepspeed   optimizer state on disk, with the split master, and half of it in host memory, each against
                             DeepSpeed's pipelined and against the disk

A row is a process of its own, as side_by_side.py measures it; jobs.py has the rows, their goals and the peer. Where the
state is on disk, that disk's mixed rate is measured before and after each row (bench/nvme/mixed.py), on the directory
that the rows use; the limit is the best median of anybody. A row's bytes are those of the formula (docs/nvme.md), its
rate is those over the whole step.
"""
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile

import jobs
import runner

STATE, SPLIT_STATE = 12, 10  # bytes per param
OF_DISK = 0.95               # of its mixed rate, what a row that is held to the disk reaches at least


@dataclasses.dataclass(frozen=True)
class Figure:
    job: str
    mode: str                # whose step over the peer's of its goal is the figure
    seconds: float           # a row may take
    further: tuple = ()      # modes whose goals belong to it, too
    on_disk: bool = False
    disk_bound: tuple = ()   # modes that are held to the disk where that is the tighter goal


FIGURES = {
    "gpu_no_offload_vs_plain": Figure("none", "strata_0", 240),
    "nvme_step_vs_deepspeed": Figure("nvme", "strata_nvme", 400, ("strata_nvme_sm", "strata_nvme_half"), True,
                                     ("strata_nvme_half",)),
}


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


def mixed_rates():
    """{who: bytes per second}; {} and a line that says why where the disk cannot be measured."""
    program = runner.ROOT / "bench" / "nvme" / "mixed.py"
    try:
        run = subprocess.run([sys.executable, str(program), str(runner.BUILD), tempfile.gettempdir()],
                             capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired as error:
        print(error, flush=True)
        return {}
    if run.returncode != 0:
        print(f"the disk is not measured: {run.stderr.strip()[-runner.TAIL:]}", flush=True)
        return {}
    return json.loads(run.stdout.splitlines()[-1])


def disk_limit(measurements):
    """{who: the median of what it reached, bytes per second}"""
    names = {name for rates in measurements for name in rates}
    return {name: statistics.median(rates[name] for rates in measurements if name in rates) for name in sorted(names)}


def disk_bytes(job, mode):
    """What a step of ours reads and writes, both together."""
    settings, params = jobs.MODES[mode].settings, jobs.SIZES[jobs.JOBS[job].size].params
    each = SPLIT_STATE if settings.get(jobs.LAYOUT) == "split" else STATE
    return 2 * max(0, each * params - settings.get(jobs.O + "cpu_state_budget", 0))


def judge(figure, mode, steps, limit):
    """One row of ours: its step over the peer's, the goal, and how near to the disk it was."""
    times, peer = goal(figure.job, mode)
    row = {"step_s": steps[mode], "of_peer": round(steps[mode] / steps[peer], 4), "goal": times}
    most = times * steps[peer]
    if figure.on_disk:
        moved = disk_bytes(figure.job, mode)
        row |= {"disk_gb": round(moved / 1e9, 2), "disk_mb_s": round(moved / steps[mode] / 1e6)}
        if limit:
            best = max(limit.values())
            row["of_disk"] = round(moved / steps[mode] / best, 4)
            if mode in figure.disk_bound:
                most = min(most, moved / (OF_DISK * best))
    return {**row, "at_most_s": round(most, 4), "pass": steps[mode] <= most}


def in_words(mode, row):
    disk = f"; {row['disk_gb']} GB at {row['disk_mb_s']} MB/s" if "disk_gb" in row else ""
    share = f", {row['of_disk']} of the disk's mixed rate" if "of_disk" in row else ""
    return (f"{mode}: {row['step_s']:.4g} s, {row['of_peer']} of the peer's (goal {row['goal']}), at most "
            f"{row['at_most_s']:.4g} s: {'reached' if row['pass'] else 'missed'}{disk}{share}")


def main():
    name, machine = sys.argv[1], runner.describe_machine()
    figure = FIGURES[name]
    target, peer = goal(figure.job, figure.mode)
    result = {"name": name, "value": None, "target": target, "unit": "x", "better": "lower",
              "against": f"{jobs.MODES[peer].title}, same machine", "machine": machine["machine"]}
    if reason := obstacle(machine, peer):
        print(f"skipped: {reason}\n" + json.dumps({**result, "skipped": reason}))
        sys.exit(77)
    steps, missing = {}, {}
    measurements = [mixed_rates()] if figure.on_disk else []
    for each in (peer, figure.mode, *figure.further):
        figures = measure(figure.job, each, figure.seconds)
        if "not_measured" in figures:
            if each not in figure.further:
                sys.exit(f"{name}: {each}: {figures['not_measured']}")
            missing[each] = figures["not_measured"]
        else:
            steps[each] = figures["step_s"]
        measurements += [mixed_rates()] if figure.on_disk else []
    limit = disk_limit(measurements)
    rows = {mode: judge(figure, mode, steps, limit) for mode in steps if mode != peer}
    for mode, row in rows.items():
        print(in_words(mode, row))
    for mode, reason in missing.items():
        print(f"{mode}: not measured: {reason}")
    result |= {"value": rows[figure.mode]["of_peer"], "rows": rows, "not_measured": missing,
               "pass": not missing and all(row["pass"] for row in rows.values())}
    if figure.on_disk:
        if not limit:
            result["pass"] = False
            missing["disk"] = "its mixed rate could not be measured"
        result["disk_mb_s"] = {who: round(rate / 1e6) for who, rate in limit.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
