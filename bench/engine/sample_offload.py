"""sample_offload_overhead: step time of the sample, ZeRO-3 and optimizer offload to RAM at 1 rank, over the same
sample with everything resident (stage 0, no offload). Runs alternate in one call; medians of steps after warm-up.
"""
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

BUILD = os.environ.get("STRATA_BUILD_DIR", os.path.join(os.path.dirname(__file__), "../../build/release"))
HERE = os.path.dirname(os.path.abspath(__file__))
MANIFEST = os.path.join(HERE, "../../examples/manifests/zero3_cpu_optimizer.toml")
RESIDENT = os.path.join(HERE, "resident.toml")
STEPS, ROUNDS = 12, 3


def step_times(manifest, text):
    """Seconds of each printed step but the first two."""
    command = [os.path.join(BUILD, "bin/gpt"), "train", "--manifest", manifest, "--set", "steps_per_print=1",
               "--text", text, "--steps", str(STEPS)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    times = [float(x) / 1000 for x in re.findall(r"step \d+: .* ([0-9.]+) ms", out)]
    if len(times) < 5:
        sys.exit("no step times in the sample's log:\n" + out)
    return times[2:]


def main():
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
        subprocess.run(["bible", "-f", "gen1:1-deu34:12"], stdout=text, check=True)
        text.flush()
        offload, resident = [], []
        for _ in range(ROUNDS):
            resident += step_times(RESIDENT, text.name)
            offload += step_times(MANIFEST, text.name)
    value = statistics.median(offload) / statistics.median(resident)
    model = next(line.split(": ")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    print(f"median step: offload {statistics.median(offload):.4f} s, resident {statistics.median(resident):.4f} s")
    print(json.dumps({"name": "sample_offload_overhead", "value": round(value, 4), "target": 1.10, "unit": "x",
                      "better": "lower", "against": "the same sample, stage 0, no offload",
                      "machine": f"{model}, {os.cpu_count()} cores"}))


main()
