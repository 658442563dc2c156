"""What the Python benches of the NVMe tier share: one short run on the disk of the build tree."""
import json
import subprocess
import sys
import tempfile

import pytest

from host_library import BUILD, ROOT

PROGRAM = ROOT / "bench" / "nvme" / "mixed.py"


def run(*arguments):
    return subprocess.run([sys.executable, "-B", str(PROGRAM), *map(str, arguments)], capture_output=True, text=True,
                          timeout=120)


def test_mixed_rates_of_a_disk():
    if not (BUILD / "bench" / "bench_nvme_python.so").exists():
        pytest.skip("the build has no bench_nvme_python.so")
    with tempfile.TemporaryDirectory(dir=BUILD) as folder:
        done = run(BUILD, folder)
        assert done.returncode == 0, done.stderr
        rates = json.loads(done.stdout.splitlines()[-1])
        assert {"tier", "pipeline"} <= set(rates) <= {"tier", "pipeline", "fio"}
        assert all(rate > 0 for rate in rates.values())


def test_a_disk_that_is_not_there_is_an_error():
    assert run(BUILD, "/no/such/directory").returncode == 1
