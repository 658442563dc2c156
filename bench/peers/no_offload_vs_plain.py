#!/usr/bin/env python3
"""no_offload_vs_plain.py: a step of strata.torch on one GPU against plain PyTorch with an fp32 master, no offload.

Both rows are measured by this call, a process each, as side_by_side.py measures the job `none`.
"""
import json
import sys

import jobs
import runner

NAME, JOB, SECONDS = "gpu_no_offload_vs_plain", "none", 240


def main():
    machine = runner.describe_machine()
    goal, peer = next(row.goal.times for row in jobs.JOBS[JOB].rows if row.mode == "strata_0")
    result = {"name": NAME, "value": None, "target": goal, "unit": "x", "better": "lower",
              "against": f"{jobs.MODES[peer].title}, same machine", "machine": machine["machine"]}
    steps = []
    for mode in (peer, "strata_0") if machine["gpus"] else ():
        figures = runner.run(JOB, mode, 1, [], SECONDS)
        print(json.dumps({"mode": mode, **figures}), flush=True)
        if "not_measured" in figures:
            sys.exit(f"{NAME}: {mode}: {figures['not_measured']}")
        steps.append(figures["step_s"])
    if not steps:
        reason = "torch sees no GPU" if machine["versions"]["torch"] else f"no torch in {sys.executable}"
        print(f"skipped: {reason}\n" + json.dumps({**result, "skipped": reason}))
        sys.exit(77)
    print(json.dumps({**result, "value": round(steps[1] / steps[0], 4)}))


if __name__ == "__main__":
    main()
