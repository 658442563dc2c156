"""mixed.py - how fast a disk takes half reads and half writes at once, by each who can: JSON, bytes per second.

    python3 mixed.py BUILD DIRECTORY

"tier" is offload_nvme with two long transfers, "pipeline" offload_nvme with the transfers of an update (tier.h), "fio"
fio where it is installed: io_uring, direct, 1 MiB, depth 32. They take turns; medians. Needs 256 MiB of memory and of
the disk.
"""
import json
import pathlib
import shutil
import statistics
import sys
import tempfile

from tier import Library, Tier

ROUNDS = 3


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: mixed.py BUILD DIRECTORY")
    library = Library(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="bench-nvme-", dir=sys.argv[2]) as folder:
        tier = Tier(library, folder)
        movers = {"tier": lambda: tier.rate("mixed"), "pipeline": tier.pipeline_rate}
        if shutil.which("fio"):
            segment = str(next(pathlib.Path(folder).rglob("segment-0"))).encode()
            movers["fio"] = lambda: library.c.bench_fio_rate(b"mixed", segment)
        rates = {name: [] for name in movers}
        for _ in range(ROUNDS):
            for name, move in movers.items():
                rates[name].append(move())
        tier.close()
    print(json.dumps({name: statistics.median(each) for name, each in rates.items()}))


if __name__ == "__main__":
    main()
