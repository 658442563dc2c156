"""examples/c/train.c, as built: its loss goes down on one rank and on two; errors are said, with an exit code."""
import os
import re
import subprocess

import pytest

from host_library import BUILD, ROOT

PROGRAM = BUILD / "bin" / "c_train"
MANIFEST = ROOT / "examples" / "c" / "train.toml"


def start(*arguments, **place):
    env = {key: value for key, value in os.environ.items() if not key.startswith(("STRATA_", "OMPI_", "PMIX"))}
    return subprocess.Popen([str(PROGRAM), *map(str, arguments)], env=env | place, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process):
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err


def losses_of(out):
    return [float(x) for x in re.findall(r"step \d+: loss ([\d.]+)[, ]", out)]


@pytest.mark.parametrize("world", [1, 2])
def test_the_loss_goes_down(world):
    ranks = [start(MANIFEST, "steps_per_print=1", STRATA_RANK=str(r), STRATA_WORLD_SIZE=str(world),
                   STRATA_JOB=f"c-example-{os.getpid()}") for r in range(world)]
    results = [finish(rank) for rank in ranks]
    assert [(code, out) for code, out, _ in results] == [(0, "")] * world
    losses = losses_of(results[0][2])
    assert len(losses) == 200 and losses[-1] < 0.1 * losses[0]
    assert all(losses_of(err) == [] for _, _, err in results[1:])


def test_micro_batches_are_of_one_step():
    """Samples are drawn in the same order: two micro-batches of 32 are one of 64, up to rounding."""
    runs = [finish(start(MANIFEST, f"train_micro_batch_size_per_gpu={64 // n}", f"gradient_accumulation_steps={n}"))
            for n in (1, 2)]
    assert [code for code, _, _ in runs] == [0] * 2
    losses = [losses_of(err) for _, _, err in runs]
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.parametrize("arguments, code, text", [
    ([], 2, r"^usage: .* MANIFEST"),
    (["/nowhere.toml"], 1, r"/nowhere\.toml: no such file"),
    ([MANIFEST, "zero_optimization.stag=3"], 1, r"did you mean `zero_optimization\.stage`"),
    ([MANIFEST, "train_micro_batch_size_per_gpu=300"], 1, r"a batch of 300: at most 256"),
])
def test_errors(arguments, code, text):
    got, out, err = finish(start(*arguments))
    assert got == code and re.search(text, err), err
    assert out == "" and losses_of(err) == []
