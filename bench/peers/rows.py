"""The rows of side_by_side.py as JSON lines in a file: what makes two of them the same, and which of them to read.

A row that could not be measured is a line, too, with "not_measured": the reason; it is tried again by the next call.
"""
import dataclasses
import hashlib
import json
import os
import subprocess
import sys

import jobs
from runner import LIBRARY, ROOT


def digest(*what):
    return hashlib.sha256("\n".join(what).encode()).hexdigest()[:12]


def build_digest():
    """Of the library, its plugins and the Python host: what a commit's number cannot say of a changed tree."""
    sha = hashlib.sha256()
    for path in (LIBRARY, *sorted((LIBRARY.parent / "plugins").glob("*")),
                 *sorted((ROOT / "hosts" / "python" / "strata").rglob("*.py"))):
        sha.update(path.name.encode() + path.read_bytes() if path.is_file() else b"")
    return sha.hexdigest()[:12]


def commit():
    """Of the tree; STRATA_COMMIT says it where there is no repository."""
    def git(*words):
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=60, check=True)
    try:
        changed = git("status", "--porcelain", "--untracked-files=no").stdout.strip()
        return git("rev-parse", "--short", "HEAD").stdout.strip() + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("STRATA_COMMIT", "unknown")


def identity(job_name, row, warm, steps, machine, build):
    """The same for two rows that would measure the same thing: job, mode, settings, machine and version."""
    job, mode, versions = jobs.JOBS[job_name], jobs.MODES[row.mode], machine["versions"]
    version = build if mode.is_ours else versions.get(mode.needs)
    what = (dataclasses.asdict(jobs.SIZES[job.size]), job.batch, job.micro_batches, job.world, job.gpus, warm, steps,
            mode.system, mode.clip, jobs.settings_of(row), versions.get("torch"), version, machine["machine_id"])
    return digest(job_name, row.mode, json.dumps(what, sort_keys=True))


class File:
    """The lines of --out. Each is written as soon as it is known; one that a killed call left torn is passed over."""

    def __init__(self, path):
        self._path = path
        text = path.read_text() if path.exists() else ""
        self._ends_a_line = not text or text.endswith("\n")
        self.lines = []
        for number, line in enumerate(text.splitlines(), 1):
            try:
                self.lines += [json.loads(line)] if line.strip() else []
            except json.JSONDecodeError:
                print(f"{path}: line {number} is torn, and passed over", file=sys.stderr)

    def append(self, line):
        self.lines.append(line)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a") as file:
            file.write(("" if self._ends_a_line else "\n") + json.dumps(line) + "\n")
            self._ends_a_line = True
            file.flush()
            os.fsync(file.fileno())

    def measured(self, key):
        return any(line["key"] == key and "step_s" in line for line in self.lines)

    def tables(self):
        """[(machine, {job: {mode: its latest line}})]; what was measured counts before what was not, in table order."""
        machines = {}
        for line in self.lines:
            if line["job"] not in jobs.JOBS or line["mode"] not in jobs.MODES:
                continue  # of an older table
            found = machines.setdefault(line["machine_id"], (line["machine"], {}))[1].setdefault(line["job"], {})
            if "step_s" in line or "step_s" not in found.get(line["mode"], {}):
                found[line["mode"]] = line
        for machine, found in machines.values():
            yield machine, {name: self._in_order(name, found[name]) for name in jobs.JOBS if name in found}

    @staticmethod
    def _in_order(job_name, lines):
        order = [row.mode for row in jobs.JOBS[job_name].rows]
        return {mode: lines[mode] for mode in order + [m for m in lines if m not in order] if mode in lines}
