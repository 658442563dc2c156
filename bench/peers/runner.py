"""Runs one row: its ranks as processes, each a session of its own that is ended by its number when time is up.

Nothing of a row outlives it: whatever a rank started is in its process group, which is killed when the row is over.
"""
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = pathlib.Path(os.environ.get("STRATA_BUILD_DIR", ROOT / "build" / "release"))
LIBRARY = pathlib.Path(os.environ.get("STRATA_LIBRARY", BUILD / "lib" / "libstrata.so"))
AFTER_A_FAILURE = 20  # seconds for the other ranks to end by themselves
AFTER_FIGURES = 30    # and for a rank whose figures are out
TAIL = 4000           # bytes of a log that are looked at for a reason


def environment():
    """Of everything that is measured."""
    path = os.pathsep.join(filter(None, [str(ROOT / "hosts" / "python"), os.environ.get("PYTHONPATH")]))
    return {"NCCL_NVLS_ENABLE": "0", **os.environ, "PYTHONPATH": path, "STRATA_LIBRARY": str(LIBRARY)}


def describe_machine():
    """machine.py's JSON; raises OSError with what it said."""
    run = subprocess.run([sys.executable, str(HERE / "machine.py")], env=environment(), capture_output=True, text=True,
                         timeout=120)
    if run.returncode != 0:
        raise OSError(f"{sys.executable} machine.py: {run.stderr.strip()[-TAIL:]}")
    return json.loads(run.stdout.splitlines()[-1])


def run(job_name, mode_name, world, arguments, seconds):
    """The figures of the row, or {"not_measured": why}. Ended after `seconds`."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        with _Ranks(pathlib.Path(name), world, [job_name, mode_name, *arguments]) as ranks:
            if not ranks.wait(seconds):
                return {"not_measured": f"ended after {seconds:.0f} s, its deadline; {ranks.log_tail()}"}
            return ranks.result()


class _Ranks:
    def __init__(self, folder, world, arguments):
        self.folder, self.world, self.processes = folder, world, []
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                  "MASTER_PORT": str(port)}
        disk = folder / "disk"
        disk.mkdir()
        for rank in range(world):
            command = [sys.executable, str(HERE / "measure.py"), *arguments, "--out", str(self._out(rank)), "--folder",
                       str(disk)]
            with open(self._log(rank), "wb") as log:
                self.processes.append(subprocess.Popen(
                    command, env={**environment(), **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=log,
                    stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True))

    def _out(self, rank):
        return self.folder / f"rank{rank}.json"

    def _log(self, rank):
        return self.folder / f"rank{rank}.log"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:  # the whole group has ended
                pass
            process.wait()

    def _figures_are_out(self):
        return all(self._out(rank).exists() for rank in range(self.world))

    def _without_figures(self):
        """Ranks that ended so."""
        return [rank for rank, process in enumerate(self.processes)
                if process.poll() is not None and not self._out(rank).exists()]

    def _one_failed(self):
        return bool(self._without_figures()) or any(process.poll() for process in self.processes)

    def wait(self, seconds):
        """Whether every rank ended or gave its figures in time, or one failed."""
        end = time.monotonic() + seconds
        while any(process.poll() is None for process in self.processes):
            now = time.monotonic()
            if now > end:
                return self._figures_are_out() or self._one_failed()
            if self._one_failed():
                end = min(end, now + AFTER_A_FAILURE)
            elif self._figures_are_out():
                end = min(end, now + AFTER_FIGURES)
            time.sleep(0.05)
        return True

    def result(self):
        """Rank 0's figures; memory of the device is the largest rank's, of the host the sum of all ranks'."""
        ranks = [json.loads(self._out(rank).read_text()) for rank in range(self.world) if self._out(rank).exists()]
        for figures in ranks:
            if "not_measured" in figures:
                return {"not_measured": " ".join(figures["not_measured"].split())[:500]}
        for rank in self._without_figures():
            return {"not_measured": f"rank {rank} ended with {self.processes[rank].returncode}; {self.log_tail(rank)}"}
        largest = {key: max(figures[key] for figures in ranks) for key in ("peak_gib", "engine_gib", "in_use_gib")
                   if ranks[0][key] is not None}
        return {**ranks[0], **largest, "host_gib": round(sum(figures["host_gib"] for figures in ranks), 2)}

    def log_tail(self, rank=0):
        """The last line a rank has written, which says why it failed, if anything does."""
        lines = self._log(rank).read_bytes()[-TAIL:].decode(errors="replace").strip().splitlines()
        return f"its last line: {lines[-1].strip()[:300]}" if lines else "it has written nothing"
