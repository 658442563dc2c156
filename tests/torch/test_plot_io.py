"""The picture of `strata bench io`: drawn here, where matplotlib is, from a short run's figures."""
import json
import subprocess
import sys
import tempfile

import pytest

from conftest import BUILD, ROOT

SECONDS = 200
SHORT = ("--seconds", "0.01", "--rounds", "3", "--file-mib", "16")


def test_a_picture_has_three_panels_for_each_disk(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib import image
    heights = []
    with tempfile.TemporaryDirectory(dir=BUILD) as one, tempfile.TemporaryDirectory(dir=BUILD) as other:
        for disks in ([one], [one, other]):
            run = subprocess.run([BUILD / "bin" / "strata", "bench", "io", "--json", *SHORT, *disks],
                                 capture_output=True, text=True, timeout=SECONDS)
            assert run.returncode == 0 and len(json.loads(run.stdout)["disks"]) == len(disks), run.stderr
            (tmp_path / "rates.json").write_text(run.stdout)
            plot = subprocess.run([sys.executable, ROOT / "tools" / "plot_io.py", tmp_path / "rates.json",
                                   tmp_path / "rates.png"], capture_output=True, text=True, timeout=SECONDS)
            assert plot.returncode == 0, plot.stdout + plot.stderr
            picture = image.imread(tmp_path / "rates.png")[..., :3]
            for panel in (slice(0, 400), slice(400, 800), slice(800, None)):
                assert picture[:, panel].min() < 0.5 < picture[:, panel].max()  # lines on white
            heights.append(len(picture))
    assert heights[1] == 2 * heights[0]
