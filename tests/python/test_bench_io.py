"""`strata bench io`: figures of every combination, settings that the tier takes, nothing left on the disk."""
import json
import tomllib
import subprocess
import sys

import pytest

from host_library import BUILD, ROOT
import strata

COMMAND = BUILD / "bin" / "strata"


def run(*arguments):
    result = subprocess.run([str(COMMAND), "bench", "io", *map(str, arguments)], capture_output=True, text=True,
                            timeout=120)
    return result.returncode, result.stdout, result.stderr


@pytest.fixture
def disks(tmp_path_factory):
    found = [tmp_path_factory.mktemp("disk") for _ in range(2)]
    yield found
    assert not any(list(disk.iterdir()) for disk in found)


def test_json_has_every_rate_and_settings_that_open(disks):
    code, out, _ = run("--json", "--seconds", "0.01", "--file-mib", "16", *disks)
    assert code == 0
    result = json.loads(out)
    assert [disk["path"] for disk in result["disks"]] == list(map(str, disks))
    for disk in result["disks"]:
        assert len({(rate["depth"], rate["piece_bytes"]) for rate in disk["rates"]}) == 12
        assert all(rate[f"{kind}_bytes_per_s"] > 0 for rate in disk["rates"] for kind in ("read", "write", "mixed"))
        assert disk["best"] in disk["rates"]
    manifest = tomllib.loads(result["manifest"])
    assert manifest["zero_optimization"]["offload_optimizer"]["nvme_path"] == ", ".join(map(str, disks))
    with strata.Engine(text="train_batch_size = 1\n" + result["manifest"], overrides=['log_level="warn"']):
        assert all(len(list(disk.iterdir())) == 1 for disk in disks)


def test_table_and_plot(disks, tmp_path):
    code, out, _ = run("--seconds", "0.01", "--file-mib", "16", disks[0])
    assert code == 0 and "mixed MB/s" in out and "queue_depth = " in out and "weights" not in out
    _, out, _ = run("--json", "--seconds", "0.01", "--file-mib", "16", disks[0])
    (tmp_path / "rates.json").write_text(out)
    plot = subprocess.run([sys.executable, ROOT / "tools" / "plot_io.py", tmp_path / "rates.json",
                           tmp_path / "rates.png"], capture_output=True, text=True, timeout=120)
    if plot.returncode == 77:
        pytest.skip(plot.stdout.strip())
    assert plot.returncode == 0 and (tmp_path / "rates.png").stat().st_size > 0


@pytest.mark.parametrize("arguments, code", [(["/no/such/directory"], 1), ([], 2), (["--seconds", "0", "/tmp"], 2)])
def test_errors(arguments, code):
    got, _, errors = run(*arguments)
    assert got == code
    if code == 1:
        assert "/no/such/directory" in errors and "No such file or directory" in errors
