"""two_paths.py - offload_nvme on two disks against each of them alone: nvme_two_paths_vs_sum. Needs root.

    python3 two_paths.py BUILD DIRECTORY

The disks are files in DIRECTORY with an ext4 each, behind loop devices that the kernel throttles (the block I/O
controller of control groups) to unequal rates, so that what is measured is the tier's dealing of stripes by measured
rates, and not the machine's one disk. Tiers on the first disk, on the second and on both take turns; the ratio is the
median rate on both over the sum of the medians alone, the figure the smallest of read, write, mixed, and of the update
of a step whose state lies there (bench_nvme_step update). The rates alone show that the throttle works.
"""
import contextlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

from tier import KINDS, MB, Library, Tier, skip

NAME, TARGET, ROUNDS = "nvme_two_paths_vs_sum", 0.9, 3
# Bytes per second, of reads and of writes. The kernel throttles in slices of 0.1 s, which have to be short beside a
# transfer and beside the tier's measurement at its start.
RATES = (60 * 10**6, 120 * 10**6)
PROBE_MS = 5000
IMAGE = 1 << 30
CGROUPS = pathlib.Path("/sys/fs/cgroup")


def output(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        skip(NAME, f"this does not work here: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextlib.contextmanager
def loop_disk(folder, name):
    """(mount point, device number) of an ext4 of its own."""
    image, mounted = folder / f"{name}.img", folder / name
    with open(image, "wb") as file:
        file.truncate(IMAGE)
    mounted.mkdir()
    device = output("losetup", "--find", "--show", "--direct-io=on", str(image))
    try:
        output("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=0", device)
        output("mount", device, str(mounted))
        try:
            number = os.stat(device).st_rdev
            yield str(mounted), f"{os.major(number)}:{os.minor(number)}"
        finally:
            subprocess.run(["umount", "--lazy", str(mounted)], check=False)
    finally:
        subprocess.run(["losetup", "--detach", device], check=False)


def own_group(root, controller):
    """This process's control group in the hierarchy of a controller ("": version 2)."""
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == controller:
            return root / path.lstrip("/")
    raise OSError(f"no control group of {controller or 'version 2'}")


def limit(group, device, rate):
    if (group / "io.max").exists():
        (group / "io.max").write_text(f"{device} rbps={rate} wbps={rate}")
        return
    for side in ("read", "write"):
        (group / f"blkio.throttle.{side}_bps_device").write_text(f"{device} {rate}")


@contextlib.contextmanager
def throttled(rates):
    """This process, at most at these rates on these devices: {device number: bytes per second}."""
    version_1 = (CGROUPS / "blkio").is_dir()
    root = CGROUPS / "blkio" if version_1 else CGROUPS
    with contextlib.ExitStack() as stack:
        try:
            if not version_1:
                (root / "cgroup.subtree_control").write_text("+io")
            before = own_group(root, "blkio" if version_1 else "")
            group = root / f"strata-bench-{os.getpid()}"
            group.mkdir()
            stack.callback(group.rmdir)
            for device, rate in rates.items():
                limit(group, device, rate)
            (group / "cgroup.procs").write_text(str(os.getpid()))
            stack.callback((before / "cgroup.procs").write_text, str(os.getpid()))
        except OSError as error:
            skip(NAME, f"the kernel throttles no block devices for this process: {error}")
        yield


def updates(build, of):
    """name -> the rate of the update phase"""
    lines = ("[plugin.offload_nvme]", f"probe_ms = {PROBE_MS}")
    rates = {}
    for name, paths in of.items():
        run = subprocess.run([os.path.join(build, "bin", "bench_nvme_step"), "update", ", ".join(paths), *lines],
                             capture_output=True, text=True)
        if run.returncode:
            sys.exit(f"{NAME}: {run.stderr.strip()}")
        rates[name] = json.loads(run.stdout.splitlines()[-1])["update_mb_s"] * MB
    return rates


def measure(library, of):
    """kind -> name -> the median rate"""
    tiers = {name: Tier(library, *paths, probe_ms=PROBE_MS) for name, paths in of.items()}
    rates = {kind: {name: [] for name in tiers} for kind in (*KINDS, "mixed")}
    for turn in range(ROUNDS):
        for kind, each in rates.items():
            for name in sorted(tiers, key=lambda name: (list(tiers).index(name) + turn) % len(tiers)):
                each[name].append(tiers[name].rate(kind))
    for tier in tiers.values():
        tier.close()
    return {kind: {name: statistics.median(values) for name, values in each.items()} for kind, each in rates.items()}


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: two_paths.py BUILD DIRECTORY")
    if os.geteuid() != 0 or not all(map(shutil.which, ("losetup", "mkfs.ext4", "mount"))):
        skip(NAME, "only root makes loop devices (losetup, mkfs.ext4, mount)")
    library = Library(sys.argv[1])
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-nvme-", dir=sys.argv[2])))
        disks = [stack.enter_context(loop_disk(folder, name)) for name in ("a", "b")]
        stack.enter_context(throttled({number: rate for (_, number), rate in zip(disks, RATES)}))
        places = [place for place, _ in disks]
        of = {"first": places[:1], "second": places[1:], "both": places}
        rates = measure(library, of) | {"update": updates(sys.argv[1], of)}
    ratios = {}
    for kind, each in rates.items():
        ratios[kind] = round(each["both"] / (each["first"] + each["second"]), 3)
        print(f"{kind:6} first {each['first'] / MB:.0f} MB/s, second {each['second'] / MB:.0f}, both "
              f"{each['both'] / MB:.0f}: {ratios[kind]} of the sum")
    value = min(ratios.values())
    print(json.dumps({"name": NAME, "value": value, "target": TARGET, "pass": value >= TARGET, "unit": "x",
                      "better": "higher", **ratios,
                      "both_mb_s": {kind: round(each["both"] / MB) for kind, each in rates.items()},
                      "against": "the sum of two throttled disks alone"}))


main()
