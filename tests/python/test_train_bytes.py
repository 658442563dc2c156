"""examples/python/train_bytes.py trains, by hand and from its command line, and its gradients are those of its loss."""
import argparse
import importlib.util
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from host_library import ROOT
import strata

PROGRAM = ROOT / "examples" / "python" / "train_bytes.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_bytes", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    return path


def test_gradients_are_those_of_the_loss(example):
    """Central differences of the fp32 loss along the gradient itself, where they are largest: within 2 %."""
    random = np.random.default_rng(3)
    context = random.integers(0, 256, (8, example.CONTEXT))
    target = random.integers(0, 256, 8)
    manifest = PROGRAM.with_suffix(".toml")
    with strata.Engine(manifest, overrides=["bf16.enabled=false", "gradient_clipping=0", "log_level=warn"]) as engine:
        units = example.register(engine)

        def loss():
            logits, inputs = example.forward(engine, units, context)
            return example.loss_and_gradient(logits, target) + (inputs,)

        _, d, inputs = loss()
        example.backward(engine, units, context, d, inputs)
        params = [p for _, of_unit in units for p in of_unit]
        gradients = {p: p.read("grad") for p in params}
        engine.step(lr=0)
        for p, g in gradients.items():
            weight, norm = p.read(), float(np.linalg.norm(g))
            h = 1e-2
            ends = []
            for sign in (1, -1):
                p.write((weight + sign * h * g / norm).astype(np.float32))
                ends.append(loss()[0])
            p.write(weight)
            assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(norm, rel=0.02), p.name


def test_threads_train_as_one_model(example, text):
    args = argparse.Namespace(text=text, manifest=PROGRAM.with_suffix(".toml"), steps=40,
                              set=["train_micro_batch_size_per_gpu=64", "steps_per_print=0", "log_level=warn"])
    for losses in strata.run_threads(2, lambda rank: example.train(args, rank)):
        assert losses[0] > 5 and losses[-1] < 1


def test_the_command_line(text):
    command = [sys.executable, str(PROGRAM), str(text), "--steps", "20", "--threads", "2"]
    for setting in ("steps_per_print=10", "train_micro_batch_size_per_gpu=32"):
        command += ["--set", setting]
    env = dict(os.environ, PYTHONPATH=str(ROOT / "hosts" / "python"))
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=60)
    line = r"step \d+: loss ([\d.]+) \(rank 0\), grad norm [\d.]+, .* ms, [\d]+ tokens/s and"
    losses = [float(x) for x in re.findall(line, done.stderr)]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert re.fullmatch(r"20 steps, mean loss of the last 10: [\d.]+\n", done.stdout)
