"""Where the threads of ranks that are processes run: as the launcher's masks say, or each on its share.

A rank prints the masks of its threads as the kernel shows them. More is tested in tests/unit_cores and tests/train.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import uuid

import pytest

import host_library  # noqa: F401 - names the library in the environment
import strata

CPUS = sorted(os.sched_getaffinity(0))
SECONDS = 60
PROGRAM = """
import json, pathlib, re, sys
sys.path.insert(0, sys.argv[1])
import strata
masks = lambda: [re.search(r"Cpus_allowed_list:\\s*(\\S+)", (task / "status").read_text()).group(1)
                 for task in pathlib.Path("/proc/self/task").iterdir()]
lines = []
before = len(masks())
with strata.Engine(text="train_micro_batch_size_per_gpu = 1\\nthreads = 3\\ndeadline_seconds = 30\\n",
                   log=lambda level, domain, text: lines.append(text)) as engine:
    engine.unit("u").param("p", (8,))
    engine.commit()
    main = (pathlib.Path("/proc/self/status").read_text())
    print(json.dumps({"masks": sorted(masks()), "others": before, "log": [x for x in lines if "bound to CPU" in x],
                      "main": re.search(r"Cpus_allowed_list:\\s*(\\S+)", main).group(1)}))
"""

pytestmark = [pytest.mark.skipif(len(CPUS) < 2, reason="one CPU"),
              pytest.mark.skipif(not shutil.which("taskset"), reason="no taskset")]


def ranks(*masks):
    """What two processes print, each started by taskset with a mask, or without."""
    package = os.path.dirname(os.path.dirname(strata.__file__))
    env = {key: value for key, value in os.environ.items()
           if key == "STRATA_LIBRARY" or not key.startswith(("STRATA_", "OMPI_COMM", "PMIX", "SLURM"))}
    env |= {"STRATA_WORLD_SIZE": "2", "STRATA_JOB": uuid.uuid4().hex, "OPENBLAS_NUM_THREADS": "1"}
    started = []
    for rank, mask in enumerate(masks):
        launcher = ["taskset", "-c", str(mask)] if mask is not None else []
        started.append(subprocess.Popen([*launcher, sys.executable, "-c", PROGRAM, package],
                                        env=env | {"STRATA_RANK": str(rank)}, stdout=subprocess.PIPE, text=True))
    return [json.loads(rank.communicate(timeout=SECONDS)[0]) for rank in started]


def cpus(text):
    return {cpu for part in text.split(",") for first, _, last in [part.partition("-")]
            for cpu in range(int(first), int(last or first) + 1)}


def test_ranks_divide_what_both_may_use():
    results = ranks(None, None)
    shares = []
    for result in results:
        assert cpus(result["main"]) == set(CPUS)
        share = {mask for mask in result["masks"] if cpus(mask) != set(CPUS)}
        assert len(share) == 1 and [result["masks"].count(mask) for mask in share] == [4]
        (mask,) = share
        shares.append(cpus(mask))
        (line,) = result["log"]
        assert re.search(f"3 worker thread\\(s\\), bound to CPU {mask} of ", line)
    assert not shares[0] & shares[1] and shares[0] | shares[1] == set(CPUS)


def test_masks_of_the_launcher_are_taken_as_they_are():
    last, first = CPUS[-1], CPUS[0]
    for result, mask in zip(ranks(last, first), (last, first)):
        assert set(result["masks"]) == {str(mask)} and not result["log"]


def test_one_cpu_for_both_binds_nothing():
    for result in ranks(CPUS[0], CPUS[0]):
        assert set(result["masks"]) == {str(CPUS[0])} and not result["log"]
