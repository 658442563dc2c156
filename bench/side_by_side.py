#!/usr/bin/env python3
"""side_by_side.py: plain PyTorch, FSDP2, torchao, DeepSpeed and Strata train the same model on the same machine.

Each mode of a job is a process of its own (one per rank), and a JSON line of --out as soon as it is measured; rows
that are there are not measured again. Jobs, modes and goals are a table, peers/jobs.py; docs/side_by_side.md says what
the columns mean. The last line printed is JSON, as for every name of bench/run: of the rows of this call, or with
--no-measure of those that --out holds of the newest machine.
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
    parser.add_argument("--gpus", type=int, metavar="N", help="jobs of N GPUs (0: on the CPU), of --only's the "
                        "variants for N; as many as there are if neither this nor --only is given")
    parser.add_argument("--only", type=words, metavar="JOB[,JOB]", help=f"these jobs: {', '.join(jobs.JOBS)}")
    parser.add_argument("--modes", type=words, metavar="MODE[,MODE]", help=f"these modes: {', '.join(jobs.MODES)}")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start no row that cannot end in time")
    parser.add_argument("--steps", type=jobs.at_least(1), help="measured steps, not the job's")
    parser.add_argument("--warm", type=jobs.at_least(0), help="steps before them, not the job's")
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
    return args, parser


def variant(name, gpus):
    """The job of this name for so many GPUs: itself, or as NAME_N; LookupError."""
    for job in (name, f"{name}_{gpus}"):
        if job in jobs.JOBS and jobs.JOBS[job].gpus == gpus:
            return job
    raise LookupError(f"job {name} has no variant for {gpus} GPUs; {jobs_for(gpus)}")


def jobs_for(gpus):
    """What there is, in words."""
    names = [name for name, job in jobs.JOBS.items() if job.gpus == gpus]
    if names:
        return f"jobs for {gpus}: {', '.join(names)}"
    return f"there are jobs for {', '.join(map(str, sorted({job.gpus for job in jobs.JOBS.values()})))} GPUs"


def selected(only, modes, gpus):
    """[(job name, Row)] in the table's order. `gpus`: None, jobs for any number. LookupError: nothing is."""
    if only:
        names = only if gpus is None else [variant(name, gpus) for name in only]
    else:
        names = [name for name, job in jobs.JOBS.items() if job.gpus == gpus]
        if not names:
            raise LookupError(f"no job is for {gpus} GPUs; {jobs_for(gpus)}")
    every = [(name, row) for name in jobs.JOBS if name in names for row in jobs.JOBS[name].rows]
    chosen = [(name, row) for name, row in every if not modes or row.mode in modes]
    if not chosen:
        raise LookupError(f"no mode called {' or '.join(modes)} is in {', '.join(names)}; there are "
                          f"{', '.join(dict.fromkeys(row.mode for _, row in every))}")
    return chosen


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
        gpus = self.args.gpus
        if gpus is None and not self.args.only:
            gpus = self.machine["gpus"]
        return selected(self.args.only, self.args.modes, gpus)

    def left(self):
        limit = self.args.time_limit
        return float("inf") if limit is None else limit - (time.monotonic() - self.began)

    def measure(self, chosen):
        for name, row in chosen:
            job = jobs.JOBS[name]
            warm, steps = job.warm if self.args.warm is None else self.args.warm, self.args.steps or job.steps
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


def summary(lines, machine):
    """The part of a goal, time or memory, that one of our rows is farthest from, as a multiple of it."""
    worst = report.farthest(lines)
    measured = sum("step_s" in line for line in lines)
    result = {"name": NAME, "value": round(worst[0], 4) if worst else None, "target": 1.0, "unit": "x",
              "better": "lower", "against": worst[1] if worst else "no row with a goal", "rows": measured,
              "not_measured": [f"{x['job']} {x['mode']}: {x['not_measured']}" for x in lines if "not_measured" in x],
              "machine": machine}
    return result if measured else {**result, "skipped": "no row was measured"}


def measured_now(args, parser):
    """(the file of the rows, this call's lines, the machine)"""
    run = Run(args)
    try:
        chosen = run.chosen()
    except LookupError as error:
        parser.error(error)
    run.measure(chosen)
    return run.file, run.lines, run.machine["machine"]


def measured_before(args):
    file = rows.File(args.out)
    machine, found = report.newest(file)
    return file, [line for lines in found.values() for line in lines.values()], machine


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that a row's processes end, too
    args, parser = arguments()
    file, lines, machine = measured_before(args) if args.no_measure else measured_now(args, parser)
    if args.table:
        print(report.table(file))
    if args.plot:
        try:
            report.plot(file, args.plot)
        except ValueError as error:
            print(f"{args.plot} is not drawn: {args.out}: {error}", file=sys.stderr)
    result = summary(lines, machine)
    print(json.dumps(result))
    sys.exit(77 if "skipped" in result else 0)


if __name__ == "__main__":
    main()
