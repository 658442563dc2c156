"""`strata bench io`: figures of every combination, settings that the tier takes, nothing left on the disk.

What follows from figures is tests/unit_tools' business: these runs are too short for it.
"""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib

import pytest

from host_library import BUILD, ROOT
import strata

COMMAND = BUILD / "bin" / "strata"


SHORT = ("--seconds", "0.01", "--rounds", "3", "--file-mib", "16")


def run(*arguments, cwd=None):
    result = subprocess.run([str(COMMAND), "bench", "io", *map(str, arguments)], capture_output=True, text=True,
                            timeout=120, cwd=cwd)
    return result.returncode, result.stdout, result.stderr


@pytest.fixture
def disks():
    """In the build tree: temporary directories may lie in RAM."""
    with tempfile.TemporaryDirectory(dir=BUILD) as one, tempfile.TemporaryDirectory(dir=BUILD) as other:
        found = [pathlib.Path(one).resolve(), pathlib.Path(other).resolve()]
        yield found
        assert not any(list(disk.iterdir()) for disk in found)


def test_json_has_every_rate_and_settings_that_open(disks):
    code, out, _ = run("--json", *SHORT, *disks)
    assert code == 0
    result = json.loads(out)
    assert [disk["path"] for disk in result["disks"]] == list(map(str, disks))
    for disk in result["disks"]:
        assert len({(rate["depth"], rate["piece_bytes"]) for rate in disk["rates"]}) == 12
        assert all(rate[f"{kind}_bytes_per_s"] > 0 for rate in disk["rates"] for kind in ("read", "write", "mixed"))
        assert all(rate["mixed_spread"] >= 0 for rate in disk["rates"])
        assert disk["chosen"] in disk["rates"] and f"the noise is {int(100 * disk['noise'] + 0.5)} %" in disk["advice"]
        assert (32, 1 << 20) == (disk["pipeline"][0]["depth"], disk["pipeline"][0]["piece_bytes"])
        settings = [(each["depth"], each["piece_bytes"]) for each in disk["pipeline"]]
        fastest = max(disk["pipeline"], key=lambda each: each["bytes_per_s"])
        chosen = (disk["chosen"]["depth"], disk["chosen"]["piece_bytes"])
        assert len(set(settings)) == len(settings) and chosen == (fastest["depth"], fastest["piece_bytes"])
        for each in disk["pipeline"]:
            assert each["bytes_per_s"] * each["s_per_1e9_params"] == pytest.approx(24e9)
            assert each["bytes_per_s"] * each["s_per_1e9_params_split"] == pytest.approx(20e9)
        assert disk["in_memory"] is False and f"# {disk['path']}: {disk['advice']}" in result["manifest"]
    assert f"# {disks[0]} and {disks[1]} lie on one file system" in result["manifest"]
    manifest = tomllib.loads(result["manifest"])
    assert manifest["zero_optimization"]["offload_optimizer"]["nvme_path"] == ", ".join(map(str, disks))
    with strata.Engine(text="train_batch_size = 1\n" + result["manifest"], overrides=['log_level="warn"']):
        assert all(len(list(disk.iterdir())) == 1 for disk in disks)


def test_the_keys_go_into_the_sections_of_a_manifest(disks):
    """As the printed comments say: into sections that are there, and the path to offload_param, too."""
    code, out, _ = run("--json", *SHORT, disks[0])
    assert code == 0
    text = json.loads(out)["manifest"]
    assert "# put these keys into the sections that are there" in text
    assert "offload_param] with device = \"nvme\" needs the same nvme_path" in text
    advised = tomllib.loads(text)
    sections = {"zero_optimization.offload_optimizer": advised["zero_optimization"]["offload_optimizer"],
                "plugin.offload_nvme": advised["plugin"]["offload_nvme"]}
    lines = []
    for line in (ROOT / "examples" / "manifests" / "zero3_nvme.toml").read_text().splitlines():
        if not line.startswith("nvme_path"):
            lines.append(line)
        if line == "[zero_optimization.offload_param]":
            lines.append(f"nvme_path = {json.dumps(advised['zero_optimization']['offload_optimizer']['nvme_path'])}")
        keys = sections.pop(line.strip("[]"), {}) if line.startswith("[") else {}
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items() if key != "device"]
    for section, keys in sections.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    with strata.Engine(text="\n".join(lines), overrides=['log_level="warn"']):
        assert len(list(disks[0].iterdir())) == 1


def is_under_way(process, disk):
    """It has its file open, on this disk."""
    for fd in pathlib.Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith(f"{disk}/") and fd.stat().st_size >= 16 << 20:
            return True
    return False


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_however_it_ends(disks, end):
    # Whoever runs the tests in the background may have SIGINT ignored, which processes inherit.
    with subprocess.Popen([str(COMMAND), "bench", "io", *SHORT[2:], "--seconds", "30", str(disks[0])],
                          stdout=subprocess.DEVNULL,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as process:
        try:
            deadline = time.monotonic() + 60
            while not is_under_way(process, disks[0]):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            assert not list(disks[0].iterdir())
            process.send_signal(end)
            assert process.wait(60) == -end
        finally:
            process.kill()
    assert not list(disks[0].iterdir())


def test_a_disk_without_the_room_is_refused_before_anything_is_written(disks):
    wanted = (shutil.disk_usage(disks[0]).free >> 20) + 4096
    if wanted > 1 << 20:
        pytest.skip("the disk takes the largest file there can be")
    code, out, errors = run("--file-mib", wanted, disks[0])
    assert code == 1 and out == ""
    told = re.search(r"needs (\d+) MiB, (\d+) MiB are free; --file-mib takes less", errors)
    assert told and int(told[1]) == wanted and int(told[2]) < wanted, errors
    assert str(disks[0]) in errors


def test_table(disks):
    code, out, _ = run(*SHORT, disks[0])
    assert code == 0 and "mixed MB/s" in out and "queue_depth = " in out and "weights" not in out
    assert out.count("  <-") == 2 and "the noise is" in out and "warning" not in out
    rates, pipeline = out.split("the pipeline of an update")
    assert rates.count("  <-") == 1
    assert re.search(r"^ +32 +1024 +\d+ +\d+\.\d\d +\d+\.\d\d", pipeline, re.MULTILINE)
    assert re.search(r"# .*: the pipeline reaches [\d.]+ MB/s: an update takes [\d.]+ s per 1e9 params", pipeline)
    assert "one file system" not in out


# The picture itself is tests/torch's, whose environment has matplotlib.
def test_a_plot_without_matplotlib_is_skipped_by_name(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('there is none here')")
    plot = subprocess.run([sys.executable, ROOT / "tools" / "plot_io.py", tmp_path / "in.json", tmp_path / "out.png"],
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120)
    assert plot.returncode == 77 and plot.stdout == "skipped: matplotlib is not installed (python3-matplotlib)\n"


def test_the_path_is_one_that_any_manifest_can_name(disks):
    """Relative, with dots, or through a symbolic link: what is printed is the directory itself."""
    disk = disks[0]
    (disks[1] / "inner").mkdir()
    link = disks[1] / "inner" / "link"
    link.symlink_to(disk)
    for typed, cwd in ((".", disk), (disk.name + "/", disk.parent), (f"../{disk.name}/.", disk), (link, None)):
        code, out, errors = run("--json", *SHORT, typed, cwd=cwd)
        assert code == 0, errors
        result = json.loads(out)
        manifest = tomllib.loads(result["manifest"])
        assert manifest["zero_optimization"]["offload_optimizer"]["nvme_path"] == str(disk)
        assert result["disks"][0]["path"] == str(disk)
    code, _, errors = run(*SHORT, disk, link)
    assert code == 1 and f"{disk} is named twice" in errors
    link.unlink()
    comma = disks[1] / "inner" / "a,b"
    comma.mkdir()
    code, _, errors = run(*SHORT, comma)
    assert code == 1 and "separates directories by commas" in errors
    comma.rmdir()
    (disks[1] / "inner").rmdir()


def test_a_disk_of_ram_is_called_one():
    shm = pathlib.Path("/dev/shm")
    kinds = {line.split()[1]: line.split()[2] for line in pathlib.Path("/proc/mounts").read_text().splitlines()}
    if kinds.get(str(shm)) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs")
    with tempfile.TemporaryDirectory(dir=shm) as directory:
        code, out, _ = run(*SHORT, directory)
        assert code == 0 and "warning: it lies in RAM (tmpfs)" in out and "refuses as not aligned" in out
        code, out, _ = run("--json", *SHORT, directory)
        result = json.loads(out)
        assert result["disks"][0]["in_memory"] is True
        assert f"# {directory} lies in RAM (tmpfs): this measures no disk\n" in result["manifest"]


@pytest.mark.parametrize("arguments, code", [(["/no/such/directory"], 1), ([], 2), (["--seconds", "0", "/tmp"], 2),
                                             (["--rounds", "2", "/tmp"], 2)])
def test_errors(arguments, code):
    got, _, errors = run(*arguments)
    assert got == code
    if code == 1:
        assert "/no/such/directory" in errors and "No such file or directory" in errors
