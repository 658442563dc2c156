"""Ranks of rank_program.py as processes, on the CPU or with a GPU each; and whether there are GPUs to test on.

    with TorchJob(folder, 2, stage=3, steps=10) as job:
        runs = job.results()
"""
import json
import os
import pathlib
import sys

import pytest
import torch

from conftest import BUILD
from rank_processes import Job

CUDA_PLUGINS = ("device_cuda", "optim_adamw_cuda")
PROGRAM = pathlib.Path(__file__).with_name("rank_program.py")


def missing_gpus(world):
    """Why nothing can be trained here on `world` GPUs; "" when it can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.cuda.device_count() < world:
        return f"{torch.cuda.device_count()} GPU, {world} are needed"
    plugins = CUDA_PLUGINS + (("comm_nccl",) if world > 1 else ())
    left_out = [name for name in plugins if not (BUILD / "lib" / "plugins" / f"{name}.so").exists()]
    return f"{', '.join(left_out)} were not built" if left_out else ""


def on_gpus(world):
    """The mark of a test that needs them."""
    return pytest.mark.skipif(bool(missing_gpus(world)), reason=missing_gpus(world))


class TorchJob(Job):
    """`what` is what rank_program.py takes."""

    def __init__(self, folder, world, **what):
        super().__init__(folder, world, [], **what)

    @property
    def environment(self):  # torch makes its compiler's folder, in TMPDIR if not told otherwise, when it is imported
        return {"STRATA_BUILD_DIR": str(BUILD), "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
                "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "compiled"),
                "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no workers: torch 2.4's outlive a rank for a moment

    def command(self, arguments, settings):
        return [sys.executable, "-B", str(PROGRAM), str(self.folder), json.dumps(settings)]

    def results(self):
        """[(losses, state dict, counters of the last step)] by rank, once all have ended well."""
        self.succeed()
        return [torch.load(self.folder / f"rank{rank}") for rank in range(self.world)]


def deterministic_cuda():
    """For numbers that are compared bit for bit; before the first product on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
