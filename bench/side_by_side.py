#!/usr/bin/env python3
"""side_by_side.py: plain PyTorch, FSDP2, torchao, DeepSpeed and Strata train the same model on the same machine.

Each mode of a job is a process of its own (one per rank), and a JSON line of --out as soon as it is measured; rows
that are there are not measured again. Jobs, modes and goals are a table, peers/jobs.py; docs/side_by_side.md says what
the columns mean. The last line printed is JSON, as for every name of bench/run.
"""
import argparse
import datetime
import json
import pathlib
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "peers"))

import jobs
import report
import rows
import runner

NAME = "side_by_side"
START = 25            # seconds a row takes beside its steps, for a small model
START_PER_BILLION = 8  # and for each 1e9 params more
PATIENCE = 2.5        # a row is ended after this many times what it is planned to take


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--gpus", type=int, metavar="N", help="jobs of N GPUs (0: on the CPU); as many as there are if "
                                                              "neither this nor --only is given")
    parser.add_argument("--only", type=words, metavar="JOB[,JOB]", help=f"these jobs: {', '.join(jobs.JOBS)}")
    parser.add_argument("--modes", type=words, metavar="MODE[,MODE]", help=f"these modes: {', '.join(jobs.MODES)}")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start no row that cannot end in time")
    parser.add_argument("--steps", type=int, help="measured steps, not the job's")
    parser.add_argument("--warm", type=int, help="steps before them, not the job's")
    parser.add_argument("--out", type=pathlib.Path, default=runner.ROOT / "build" / "side_by_side.jsonl",
                        metavar="FILE", help="JSON lines, kept and appended to; %(default)s")
    parser.add_argument("--no-measure", action="store_true", help="only --table and --plot of what --out holds")
    parser.add_argument("--table", action="store_true", help="print tables of all that --out holds")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="draw it into a PNG")
    args = parser.parse_args()
    for given, known, what in ((args.only, jobs.JOBS, "job"), (args.modes, jobs.MODES, "mode")):
        for name in given or ():
            if name not in known:
                parser.error(f"no {what} is called {name}: {', '.join(known)}")
    if args.plot and (reason := report.why_no_plot()):
        parser.error(f"--plot {args.plot}: {reason}")
    return args


def now():
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


class Run:
    """One call: the same machine and the same time for all its rows."""

    def __init__(self, args):
        self.began = time.monotonic()
        self.args, self.file = args, rows.File(args.out)
        self.machine, self.build, self.commit = runner.describe_machine(), rows.build_digest(), rows.commit()
        self.call = now()
        self.lines = []

    def chosen(self):
        """(job name, Row) in the table's order."""
        gpus = self.args.gpus
        if gpus is None and not self.args.only:
            gpus = self.machine["gpus"]
        for name, job in jobs.JOBS.items():
            if (self.args.only and name not in self.args.only) or (gpus is not None and job.gpus != gpus):
                continue
            for row in job.rows:
                if not self.args.modes or row.mode in self.args.modes:
                    yield name, row

    def left(self):
        limit = self.args.time_limit
        return float("inf") if limit is None else limit - (time.monotonic() - self.began)

    def measure_all(self):
        for name, row in self.chosen():
            job = jobs.JOBS[name]
            warm, steps = self.args.warm or job.warm, self.args.steps or job.steps
            key = rows.identity(name, row, warm, steps, self.machine, self.build)
            if self.file.measured(key):
                print(f"{name} {row.mode}: is there", flush=True)
                self.lines.append(next(x for x in self.file.lines if x["key"] == key and "step_s" in x))
                continue
            self.add(name, row, {"key": key, "warm": warm, "steps": steps}, self.figures(name, row, warm, steps))

    def figures(self, name, row, warm, steps):
        job = jobs.JOBS[name]
        billions = jobs.SIZES[job.size].params / 1e9
        planned = START + START_PER_BILLION * billions + (warm + steps) * row.expected
        if reason := self.obstacle(job, jobs.MODES[row.mode], planned):
            return {"not_measured": reason}
        return runner.run(name, row.mode, job.world, ["--warm", str(warm), "--steps", str(steps)],
                          min(PATIENCE * planned, self.left()))

    def obstacle(self, job, mode, planned):
        """Why a row cannot be started; "" if it can."""
        need = mode.host_bytes * jobs.SIZES[job.size].params
        if not self.machine["versions"]["torch"]:
            return f"torch is not installed in {sys.executable}"
        if mode.needs and not self.machine["versions"][mode.needs]:
            return f"{mode.needs} is not installed"
        if job.gpus > self.machine["gpus"]:
            return f"needs {job.gpus} GPU, the machine has {self.machine['gpus']}"
        if mode.is_ours and not runner.LIBRARY.exists():
            return f"there is no {runner.LIBRARY}: build it, or set STRATA_BUILD_DIR"
        if need > self.machine["host_bytes"]:
            return (f"about {mode.host_bytes:g} bytes of host memory per param are {need / 2**30:.0f} GiB, the machine "
                    f"has {self.machine['host_bytes'] / 2**30:.0f}")
        if planned > self.left():
            return f"no time: it takes about {planned:.0f} s, {max(self.left(), 0):.0f} are left"
        return ""

    def add(self, name, row, what, figures):
        job = jobs.JOBS[name]
        machine = {key: self.machine[key] for key in ("machine", "machine_id", "versions")}
        line = {"job": name, "mode": row.mode, "world": job.world, **figures, **what, "size": job.size,
                "batch": job.batch, "micro_batches": job.micro_batches, "settings": jobs.settings_of(row), **machine,
                "commit": self.commit, "build": self.build, "call": self.call, "date": now()}
        self.file.append(line)
        self.lines.append(line)
        said = figures.get("not_measured")
        said = f"not measured: {said}" if said else (f"{line['step_s']:.4g} s, device {line['peak_gib']} GiB, host "
                                                     f"{line['host_gib']} GiB, loss {line['loss']:.4f}")
        print(f"{name} {row.mode}: {said}", flush=True)

    def summary(self):
        """The worst step among our rows that have a goal, as a multiple of it."""
        measured = [line for line in self.lines if "step_s" in line]
        by_job = {}
        for line in self.lines:
            by_job.setdefault(line["job"], {})[line["mode"]] = line
        goals = [(line["step_s"], report.goal_seconds(report.goal_of(line["job"], line["mode"]), by_job[line["job"]]))
                 for line in measured]
        worst = [step / goal for step, goal in goals if goal]
        result = {"name": NAME, "value": round(max(worst), 4) if worst else None, "target": 1.0, "unit": "x",
                  "better": "lower", "against": "the goal of the row farthest from its own", "rows": len(measured),
                  "not_measured": [f"{x['job']} {x['mode']}: {x['not_measured']}" for x in self.lines
                                   if "not_measured" in x], "machine": self.machine["machine"]}
        return result if measured else {**result, "skipped": "no row was measured"}


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that a row's processes end, too
    args = arguments()
    run = None if args.no_measure else Run(args)
    if run:
        run.measure_all()
    file = run.file if run else rows.File(args.out)
    if args.table:
        print(report.table(file))
    if args.plot:
        report.plot(file, args.plot)
    if run:
        result = run.summary()
        print(json.dumps(result))
        sys.exit(77 if "skipped" in result else 0)


if __name__ == "__main__":
    main()
