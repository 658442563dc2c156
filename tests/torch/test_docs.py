"""What README.md and docs/pytorch.md show is run, and the example trains, on two ranks and after a resume."""
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

ENVIRONMENT = dict(os.environ, PYTHONPATH=str(ROOT / "hosts" / "python"), OMP_NUM_THREADS="1")
PROGRAM = ROOT / "examples" / "python" / "train_gpt_torch.py"


@pytest.mark.parametrize("page", ["README.md", "docs/pytorch.md"])
def test_snippets_run(page, tmp_path):
    blocks = re.findall(r"^```py\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    assert blocks
    for place in (tmp_path, tmp_path / "examples" / "manifests"):
        shutil.copytree(ROOT / "examples" / "manifests", place, dirs_exist_ok=True)
    for code in blocks:
        run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=ENVIRONMENT, capture_output=True,
                             text=True, timeout=120)
        assert run.returncode == 0, run.stderr


def test_the_command_of_two_ranks():
    command = re.search(r"^```sh\n(.*?)^```", (ROOT / "docs" / "pytorch.md").read_text(), re.M | re.S)[1]
    assert "torchrun" in command
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    run = subprocess.run(["bash", "-c", command], cwd=ROOT, env=dict(os.environ, PATH=path, OMP_NUM_THREADS="1"),
                         capture_output=True, text=True, timeout=200)
    assert run.returncode == 0 and "rank 0 of 2" in run.stderr, run.stderr


def run_example(tmp_path, *arguments, launcher=(sys.executable,)):
    command = [*launcher, str(PROGRAM), str(tmp_path / "text"), "--generate", "5", *arguments]
    for setting in ("steps_per_print=10", "train_micro_batch_size_per_gpu=2"):
        command += ["--set", setting]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    return [(int(step), float(loss)) for step, loss in
            re.findall(r"step (\d+): loss ([\d.]+)(?: \(rank 0\))?, grad norm [\d.]+, .* ms, \d+ tokens/s", run.stderr)]


def test_the_example_trains_resumes_and_runs_on_two_ranks(tmp_path):
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 50)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    first = run_example(tmp_path, "--steps", "20", "--checkpoints", str(tmp_path / "c"), launcher=torchrun)
    assert [step for step, _ in first] == [10, 20] and first[1][1] < first[0][1] < 6
    later = run_example(tmp_path, "--steps", "30", "--checkpoints", str(tmp_path / "c"))
    assert [step for step, _ in later] == [30] and later[0][1] < first[1][1]
