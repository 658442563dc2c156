"""kill -9 of ranks at random moments: a run always resumes from a committed checkpoint, with the losses it had.

The sample's tiny model trains with 2 ranks as processes and saves every second step. Each kill picks, from one seeded
generator, a moment (start-up, training, saving, loading), who dies (one rank, or all), and how long after the moment's
beginning. Then: whoever is left ends by itself with an error that names the dead; `latest` names a whole checkpoint at
least as new as the last one reported saved, or nothing was saved yet; nothing is left of the run outside its
checkpoint directory; and a run that goes on from there prints the losses and gradient norms of a run that nobody
disturbed, digit by digit, and leaves nothing but committed checkpoints.

5 kills; with STRATA_SOAK=1, as ./check soak runs it, 50. A table at the end says which moments they hit.
"""
import collections
import os
import pathlib
import random
import re
import shutil
import signal
import time

import pytest

from rank_processes import PATIENCE, PROGRAM, Job

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason=f"{PROGRAM.name} was not built")

SEED = 20240611
KILLS = 50 if os.environ.get("STRATA_SOAK") == "1" else 5
STEPS, SAVE_EVERY = 12, 2
LOADED = 4  # the step of the checkpoint that runs killed while loading were to load
MOMENTS = ("save", "train", "load", "start-up", "save")

STEP_LINE = re.compile(r"step (\d+): loss (\S+) \(rank 0\), grad norm ([^\s,]+)")
MET = r"rank 0 of \d"  # the engine's log line once all ranks have met
LOADS = r"plugin checkpoint"  # the plugin is opened when it is first needed: in a resumed run, for loading
reached = collections.Counter()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    words = "in the beginning was word and with god all things were made by him light shineth darkness".split()
    chosen = random.Random(1).choices(words, k=8000)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(chosen))
    return path


@pytest.fixture(scope="module")
def train(text, tmp_path_factory):
    """train(root, world=2, ...) starts a Job that saves to `root` and goes on from the latest checkpoint there."""
    def start(root, world=2, launcher=(), **settings):
        resume = ["--resume", str(root)] if committed_steps(root) else []
        arguments = ["--text", str(text), "--steps", str(STEPS), "--warmup", "3", "--eval-samples", "4",
                     "--save", str(root), "--save-every", str(SAVE_EVERY), *resume]
        settings = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": 1, "threads": 1} | settings
        return Job(tmp_path_factory.mktemp("job"), world, arguments, launcher, **settings)
    return start


class Reference:
    """A run that nobody disturbs: what it printed, how long its parts took, and its checkpoints."""

    def __init__(self, train, root):
        self.root = root
        with train(root) as job:
            first = self.start_up = job.wait_for(r"step 1: ")
            begin = job.wait_for(rf"step {LOADED}: ")
            self.save = job.wait_for(rf"saved .*step{LOADED:06}") - begin
            job.succeed()
            self.step = max(0.005, (begin - first) / (LOADED - 1))
            self.losses, self.held_out = losses(job)
        assert sorted(self.losses) == list(range(1, STEPS + 1))
        assert len(set(self.losses.values())) == STEPS
        assert_complete(root)
        with train(root) as job:  # has nothing to do but load
            begin = job.wait_for(LOADS)
            self.load = job.wait_for(r"resumed ") - begin
            job.succeed()


@pytest.fixture(scope="module")
def reference(train, tmp_path_factory):
    return Reference(train, tmp_path_factory.mktemp("reference") / "ckpt")


@pytest.fixture(scope="module", autouse=True)
def table(request):
    yield
    counts = ", ".join(f"{count} {moment}" for moment, count in sorted(reached.items()))
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print(f"\nkills by moment: {counts or 'none'}")


def losses(job):
    """{step: (loss, gradient norm)}, as the engine logged it, and the held-out loss, as printed."""
    steps = {int(s): (loss, norm) for s, loss, norm in STEP_LINE.findall(job.err())}
    return steps, re.findall(r"held-out loss (\S+)", job.out())


def tag(step):
    return f"step{step:06}"


def committed_steps(root):
    return [int(path.name[4:]) for path in root.glob("step*")]


def committed(root):
    """The step that `latest` names, 0 when nothing was committed; asserts that its checkpoint is whole."""
    if not (root / "latest").exists():
        return 0
    name = (root / "latest").read_text()
    assert re.fullmatch(r"step\d{6}\n", name), repr(name)
    files = {path.name for path in (root / name.strip()).iterdir()}
    assert files == {"index.h5", "rank00000.h5", "rank00001.h5"}, f"{name}: {files}"
    return int(name.strip()[4:])


def assert_complete(root):
    """What a run that reached its end leaves: every checkpoint, `latest`, and nothing else."""
    tags = {tag(step) for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)}
    assert {path.name for path in root.iterdir()} == tags | {"latest"}
    assert committed(root) == STEPS


def goes_on(train, root, reference):
    """Starts again, with no more than the directory, and compares all that is printed with the reference."""
    newest = max([0, *committed_steps(root)])
    with train(root) as job:
        out = job.succeed()
    assert re.findall(r"^resumed .* at step (\d+)$", out, re.M) == ([str(newest)] if newest else []), out
    found, held_out = losses(job)
    assert found == {step: reference.losses[step] for step in range(newest + 1, STEPS + 1)}
    assert held_out == reference.held_out
    assert_complete(root)


# ---- random kills ----------------------------------------------------------------------------------------------------

class Kill:
    """The kill of this number. Earlier kills do not change it: number 3 of 5 is number 3 of 50."""

    def __init__(self, number):
        dice = random.Random(SEED + number)
        self.moment = MOMENTS[number % len(MOMENTS)]
        self.dead = dice.choice(([0], [1], [0, 1]))
        self.fraction = dice.random()
        saving = dice.randrange(SAVE_EVERY, STEPS - 1, SAVE_EVERY)
        self.step = saving if self.moment == "save" else saving - 1

    def strike(self, job, reference):
        if self.moment == "start-up":
            delay = reference.start_up
        elif self.moment == "load":
            job.wait_for(LOADS)
            delay = reference.load
        else:
            job.wait_for(rf"step {self.step}: ")
            delay = reference.save if self.moment == "save" else reference.step
        time.sleep(delay * self.fraction)
        job.send(signal.SIGKILL, self.dead)


def where(job, root, resumed):
    """What the run was doing when it was hit, by what it had printed and what lies in the directory."""
    out = job.out()
    steps = [int(step) for step, _, _ in STEP_LINE.findall(job.err())]
    if not steps:
        if resumed and "resumed" not in out and re.search(LOADS, job.err()):
            return "load"
        return "first step" if "resumed" in out else "start-up (met)" if re.search(MET, job.err()) else "start-up"
    done = steps[-1]
    if done % SAVE_EVERY != 0 or f"/{tag(done)}\n" in out:
        return "train"
    if (root / tag(done)).exists():
        return "save (committed, not said)" if committed(root) == done else "save (before latest)"
    if (root / f".{tag(done)}.committing").exists():
        return "save (commit)"
    return "save (files)" if (root / f".{tag(done)}.partial").exists() else "save (beginning)"


@pytest.mark.parametrize("number", range(KILLS))
def test_a_killed_run_goes_on_with_the_losses_it_had(train, reference, tmp_path, number):
    root, kill = tmp_path / "ckpt", Kill(number)
    if kill.moment == "load":
        for step in range(SAVE_EVERY, LOADED + 1, SAVE_EVERY):
            shutil.copytree(reference.root / tag(step), root / tag(step))
        (root / "latest").write_text(tag(LOADED) + "\n")
    before = committed(root) if root.exists() else 0

    # A rank that died before it met the others was never seen by them: only the deadline can tell that it is missing.
    limits = {"deadline_seconds": 5} if kill.moment == "start-up" else {}
    with train(root, **limits) as job:
        kill.strike(job, reference)
        job.wait()
        reached[where(job, root, before > 0)] += 1
        job.assert_named(kill.dead)
        job.assert_nothing_left()
        out = job.out()

    found, _ = losses(job)
    assert found == {step: reference.losses[step] for step in found}
    said = [int(step) for step in re.findall(r"^saved .*/step(\d{6})$", out, re.M)]
    now = committed(root)
    assert now in [0, before, *found] and now >= max([before, *said])
    goes_on(train, root, reference)


def test_a_kill_between_commit_and_latest_is_like_any_other(train, reference, tmp_path):
    """The narrowest moment, made by hand: step 4 is committed, the new `latest` is written but not yet in its place."""
    root = tmp_path / "ckpt"
    for step in (2, 4):
        shutil.copytree(reference.root / tag(step), root / tag(step))
    (root / "latest").write_text(tag(2) + "\n")
    (root / ".latest.next").write_text(tag(4) + "\n")
    goes_on(train, root, reference)


# ---- one of four ranks -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("moment", ["start-up", r"step 3: ", r"step 4: "])
def test_three_ranks_name_the_fourth(train, tmp_path, moment):
    limits = {"deadline_seconds": 5} if moment == "start-up" else {}
    with train(tmp_path / "ckpt", 4, **limits) as job:
        if moment != "start-up":
            job.wait_for(moment)  # in the steps after 3, or in the save after step 4
        job.send(signal.SIGKILL, [2])
        job.wait()
        job.assert_named([2])
        job.assert_nothing_left()


def test_a_stopped_rank_is_named_at_the_deadline(train, tmp_path):
    with train(tmp_path / "ckpt", 4, deadline_seconds=5) as job:
        job.wait_for(r"step 1: ")
        job.send(signal.SIGSTOP, [2])
        for rank in (0, 1, 3):
            job.processes[rank].wait(PATIENCE)
        job.assert_named([2])
        assert all("stopped" in job.err(rank) for rank in (0, 1, 3)), job.everything()
        job.send(signal.SIGCONT, [2])
        assert job.wait()[2] > 0, job.everything()  # the others are gone: it ends as well
        job.assert_nothing_left()


# ---- under a launcher ------------------------------------------------------------------------------------------------

MPIRUN = shutil.which("mpirun")
LAUNCHER = (MPIRUN, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "4")
needs_mpirun = pytest.mark.skipif(not MPIRUN, reason="there is no mpirun")


@needs_mpirun
def test_a_launcher_names_the_rank_and_its_signal(train, tmp_path):
    with train(tmp_path / "ckpt", 4, LAUNCHER) as job:
        job.wait_for(r"step 3: ")
        ranks = children_of(job.processes[0].pid)
        os.kill(ranks[2], signal.SIGKILL)
        assert job.wait()[0] > 0, job.everything()
        assert re.search(r"rank 2 .*signal 9", job.everything().replace("\n", " ")), job.everything()
        job.assert_nothing_left()


@needs_mpirun
def test_interrupting_the_launcher_leaves_nobody(train, reference, tmp_path):
    root = tmp_path / "ckpt"
    with train(root, 4, LAUNCHER) as job:
        job.wait_for(r"saved .*" + tag(4))
        job.send(signal.SIGINT, [0])
        assert job.wait()[0] != 0, job.everything()
        job.assert_nothing_left()
    assert (root / "latest").exists()


def children_of(launcher):
    """{rank: process id} of the ranks that a launcher started."""
    found = {}
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            rank = re.search(r"OMPI_COMM_WORLD_RANK=(\d+)", (entry / "environ").read_text(errors="replace"))
        except OSError:  # it ended meanwhile
            continue
        if int(stat[1]) == launcher and rank:
            found[int(rank[1])] = int(entry.name)
    return found
