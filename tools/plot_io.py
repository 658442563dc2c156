#!/usr/bin/env python3
"""Draws what `strata bench io --json PATH...` measured: tools/plot_io.py RESULT.json OUT.png

Three panels per disk, rates over depth, a line per piece size; beside the mixed rates, dashed, what the pipeline of an
update reached. Needs matplotlib; without it, it says so and exits 77.
"""
import json
import pathlib
import sys


def main():
    if len(sys.argv) != 3:
        print(__doc__.strip())
        return 2
    try:
        import matplotlib
    except ImportError:
        print("skipped: matplotlib is not installed (python3-matplotlib)")
        return 77
    matplotlib.use("Agg")
    from matplotlib import pyplot

    disks = json.loads(pathlib.Path(sys.argv[1]).read_text())["disks"]
    figure, panels = pyplot.subplots(len(disks), 3, figsize=(12, 3.5 * len(disks)), squeeze=False)
    for disk, row in zip(disks, panels):
        for kind, panel in zip(("read", "write", "mixed"), row):
            for piece in sorted({rate["piece_bytes"] for rate in disk["rates"]}):
                points = [(rate["depth"], rate[f"{kind}_bytes_per_s"] / 1e6) for rate in disk["rates"]
                          if rate["piece_bytes"] == piece]
                panel.plot(*zip(*points), marker="o", label=f"{piece >> 10} KiB")
            for each in disk["pipeline"] if kind == "mixed" else ():
                panel.axhline(each["bytes_per_s"] / 1e6, linestyle="--", color="0.5",
                              label=f"pipeline, {each['depth']} x {each['piece_bytes'] >> 10} KiB")
            panel.set(title=f"{disk['path']}: {kind}", xlabel="depth", ylabel="MB/s", ylim=0)
            panel.legend()
    figure.tight_layout()
    figure.savefig(sys.argv[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
