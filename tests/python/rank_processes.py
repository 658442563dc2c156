"""Ranks of the sample as plain processes, for tests that kill them.

A Job is one run: `world` processes of build/<preset>/bin/gpt that meet by STRATA_RANK, STRATA_WORLD_SIZE and STRATA_JOB
(or one launcher that starts them), each with its output in files. It waits for lines, sends signals, and knows what a
run could leave behind: processes, abstract sockets, shared memory, temporary files; assert_nothing_left() looks for it.
"""
import itertools
import os
import pathlib
import re
import signal
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(os.environ.get("STRATA_BUILD_DIR", ROOT / "build" / "release")) / "bin" / "gpt"
MANIFEST = ROOT / "examples" / "manifests" / "zero3_cpu_optimizer.toml"

# Long enough for a crowded machine, and far below deadline_seconds of the manifest (600): a rank that ends within it
# has noticed a death, it has not run into a deadline.
PATIENCE = 120
SHARED_MEMORY = pathlib.Path("/dev/shm")
MARK = "STRATA_TEST_JOB"  # in the environment of every process of a job, to find those that outlive it
numbers = itertools.count()


def wait_until(condition, what, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.001)
    return value


def environment(folder, name):
    env = {key: value for key, value in os.environ.items() if not key.startswith(("STRATA_", "OMPI_COMM", "PMIX"))}
    env |= {MARK: name, "TMPDIR": str(folder), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return env


def shared_memory():
    return {entry.name for entry in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.exists() else set()


def is_mapped_by_somebody(name):
    """Other programs of this machine may make segments meanwhile; what a dead run left is open in no process."""
    path = str(SHARED_MEMORY / name)
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if path in (process / "maps").read_text():
                return True
            if any(os.readlink(fd).startswith(path) for fd in (process / "fd").iterdir()):
                return True
        except OSError:  # it ended meanwhile
            continue
    return False


class Job:
    """Processes of one run. `arguments` are those of gpt train; `settings` override the manifest."""

    environment = {}  # further variables of its processes

    @staticmethod
    def command(arguments, settings):
        command = [str(PROGRAM), "train", "--manifest", str(MANIFEST), "--size", "tiny", "--threads", "1", *arguments]
        return command + [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]

    def __init__(self, folder, world, arguments, launcher=(), **settings):
        self.world = world
        self.name = f"kill-{os.getpid()}-{next(numbers)}"
        self.folder = folder / self.name
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.shared_before = shared_memory()
        self.began = time.monotonic()
        command = self.command(arguments, settings)
        self.processes = []
        for rank in [0] if launcher else range(world):
            place = {"STRATA_JOB": self.name, "STRATA_RANK": str(rank), "STRATA_WORLD_SIZE": str(world)}
            with open(self.folder / f"out{rank}", "wb") as out, open(self.folder / f"err{rank}", "wb") as err:
                self.processes.append(subprocess.Popen(
                    [*launcher, *command], stdout=out, stderr=err, stdin=subprocess.DEVNULL, cwd=self.temporary,
                    env=environment(self.temporary, self.name) | self.environment | ({} if launcher else place),
                    start_new_session=True))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def out(self, rank=0):
        return (self.folder / f"out{rank}").read_text(errors="replace")

    def err(self, rank=0):
        return (self.folder / f"err{rank}").read_text(errors="replace")

    def everything(self):
        return "\n".join(f"-- rank {r}\n{self.out(r)}{self.err(r)}" for r in range(len(self.processes)))

    def wait_for(self, pattern, rank=0):
        """Waits for a line of a rank; an end of that rank before it is an error."""
        def found():
            if re.search(pattern, self.out(rank) + self.err(rank)):
                return True
            assert self.processes[rank].poll() is None, f"ended before {pattern!r}:\n{self.everything()}"
            return False
        wait_until(found, f"{pattern!r} of rank {rank}")
        return time.monotonic() - self.began

    def send(self, what, ranks):
        for rank in ranks:
            self.processes[rank].send_signal(what)

    def wait(self, seconds=PATIENCE):
        """Waits for every rank to end by itself; returns the exit codes."""
        end = time.monotonic() + seconds
        for rank, process in enumerate(self.processes):
            try:
                process.wait(max(0.001, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} still runs after {seconds} s\n{self.everything()}") from None
        return [process.returncode for process in self.processes]

    def succeed(self):
        codes = self.wait()
        assert codes == [0] * len(codes), f"{codes}\n{self.everything()}"
        self.assert_nothing_left()
        return self.out()

    def assert_named(self, dead):
        """Every rank but the dead ones has failed and says which rank it missed, by its number or process id.

        Ranks meet at rank 0, which ends with an error when one of them dies meanwhile; whoever comes after that finds
        nobody there, and can only say so.
        """
        for rank, process in enumerate(self.processes):
            if rank in dead:
                continue
            assert process.returncode > 0, f"rank {rank} ended with {process.returncode}\n{self.everything()}"
            errors = [line for line in self.err(rank).splitlines() if line.startswith("gpt: ")]
            assert len(errors) == 1, self.everything()
            names = "|".join(rf"rank {r}\b|\(pid {self.processes[r].pid}\)" for r in dead)
            names += "|rank 0 never came" if rank != 0 else ""
            assert re.search(names, errors[0].replace(f"opening rank {rank} of", "")), errors[0]

    def assert_nothing_left(self):
        assert not list(self.temporary.iterdir()), f"left in TMPDIR or the working directory: {self.temporary}"
        assert self.name not in pathlib.Path("/proc/net/unix").read_text(), "an abstract socket is left"
        left = [name for name in shared_memory() - self.shared_before if not is_mapped_by_somebody(name)]
        assert not [name for name in left if (SHARED_MEMORY / name).exists()], f"left in /dev/shm: {left}"
        running = []
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.name}\0" in (process / "environ").read_text(errors="replace"):
                    running.append(process.name)
            except OSError:  # it ended meanwhile, or is not ours to look at
                continue
        assert not running, f"processes are left: {running}"
