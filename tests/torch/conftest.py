"""Tests of strata.torch: run by ./check in a virtual environment with PyPI's torch (tools/torch_venv.sh).

Every test has a deadline: a hang ends the run with the stack of every thread. Where torch 2.4 or newer is missing, only
test_torch_is_there.py is collected, which says so.
"""
import faulthandler
import os
import pathlib
import sys

import pytest

SECONDS = 300
ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("STRATA_BUILD_DIR", ROOT / "build" / "release"))
os.environ["STRATA_LIBRARY"] = str(BUILD / "lib" / "libstrata.so")
sys.path.insert(0, str(ROOT / "hosts" / "python"))
sys.path.append(str(ROOT / "tests" / "python"))  # rank_processes.py


def missing():
    """Why there is no usable torch; "" when there is."""
    told = os.environ.get("STRATA_TORCH_REASON", "").strip().splitlines()
    reason = told[-1][:150] if told else ""
    try:
        import torch
    except ImportError:
        return reason or "torch is not installed"
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 4):
        return reason or f"torch {torch.__version__} is older than 2.4"
    torch.set_num_threads(1)  # ranks share the cores
    return ""


if missing():
    collect_ignore = [path.name for path in pathlib.Path(__file__).parent.glob("test_*.py")
                      if path.name != "test_torch_is_there.py"]


@pytest.fixture(autouse=True)
def deadline():
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
