"""examples/python/tensor_parallel.py: two tensor-parallel ranks have the losses and norms of the whole layer."""
import importlib.util
import os
import subprocess
import sys

import pytest

from host_library import ROOT
import strata

PROGRAM = ROOT / "examples" / "python" / "tensor_parallel.py"


def test_the_program_prints_the_same_twice():
    env = dict(os.environ, PYTHONPATH=str(ROOT / "hosts" / "python"))
    done = subprocess.run([sys.executable, str(PROGRAM)], env=env, check=True, capture_output=True, text=True,
                          timeout=60)
    rows = [[float(word) for word in line.split()] for line in done.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == [1, 2, 3, 4, 5]
    for _, loss, norm, split_loss, split_norm in rows:
        assert (split_loss, split_norm) == pytest.approx((loss, norm), rel=1e-5)
        assert norm > 0.5, "it is clipped, so that a wrong norm would show in the losses, too"
    assert rows[-1][1] < rows[0][1]


def test_slices_that_are_not_declared_are_not_counted(monkeypatch):
    """What the flag is for: without it the norm is tensor rank 0's alone."""
    spec = importlib.util.spec_from_file_location("tensor_parallel", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)

    def norm(ranks):
        add = program.Sum(ranks)
        return strata.run_threads(ranks, lambda rank: program.train(rank, add))[0][0][1]
    whole = norm(1)
    param = strata.model.Unit.param
    monkeypatch.setattr(strata.model.Unit, "param",
                        lambda *args, tensor_model_parallel=False, **more: param(*args, **more))
    assert norm(2) < 0.9 * whole
