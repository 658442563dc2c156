"""norm_overhead: what the norm and the finite check add to a step with state in host memory, in percent of the step
without them; 32 Mi params in units of 4 Mi, the worse of bf16 and fp32.

Both are one pass over the reduced gradient, and no setting leaves it out: its time is taken from traces. A program that
clips and one that does not take turns in the same call; what clipping does to the step is printed beside it. The step
is the shortest one there is: gradients are handed over, reduced and applied, nothing is computed.
"""
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("STRATA_BUILD_DIR", ROOT / "build" / "release"))
os.environ.setdefault("STRATA_LIBRARY", str(BUILD / "lib" / "libstrata.so"))
sys.path.insert(0, str(ROOT / "hosts" / "python"))

import numpy as np  # noqa: E402
import strata  # noqa: E402

UNITS, SIDE, WARM, STEPS = 8, 2048, 3, 30
# overlap_comm: nothing else of the step shares the cores with the norm while it is measured.
MANIFEST = """
train_micro_batch_size_per_gpu = 1
gradient_accumulation_steps = 1
gradient_clipping = {clip}
log_level = "warn"
[zero_optimization]
stage = 2
overlap_comm = false
[zero_optimization.offload_optimizer]
device = "cpu"
[trace]
path = "{folder}"
first_step = {first}
steps = {steps}
"""


class Program:
    def __init__(self, dtype, clip, folder):
        self.folder, self.seconds = folder, []
        self.engine = strata.Engine(text=MANIFEST.format(clip=clip, folder=folder, first=WARM + 1, steps=STEPS))
        units = [self.engine.unit(f"unit{k}") for k in range(UNITS)]
        self.params = [unit.param(f"w{k}", (SIDE, SIDE), dtype=dtype) for k, unit in enumerate(units)]
        self.engine.commit()
        ones = np.full((SIDE, SIDE), 0x3f80, np.uint16).view(strata.bfloat16)
        self.gradient = ones if dtype == "bf16" else np.ones((SIDE, SIDE), np.float32)

    def step(self):
        start = time.perf_counter()
        for param in reversed(self.params):
            param.grad(self.gradient)
        self.engine.end_backward()
        self.engine.step()
        self.engine.wait()
        self.seconds.append(time.perf_counter() - start)

    def norms(self):
        """Seconds of each step: one micro-batch that stays where it is has nothing else done to it when it arrives."""
        self.engine.close()
        (file,) = pathlib.Path(self.folder).glob("*.json")
        steps = {}
        for event in json.loads(file.read_text())["traceEvents"]:
            if event["name"] == "take in":
                step = event["args"]["step"]
                steps[step] = steps.get(step, 0) + event["dur"] / 1e6
        return [steps[step] for step in sorted(steps)]


def measure(dtype):
    """(percent added by the norm, times a step that clips takes of one that does not)"""
    with tempfile.TemporaryDirectory() as folder:
        plain, clipping = Program(dtype, 0.0, folder + "/plain"), Program(dtype, 1.0, folder + "/clipping")
        for _ in range(WARM + STEPS):
            plain.step()
            clipping.step()
        norms = clipping.norms()
        plain.engine.close()
    steps = clipping.seconds[WARM:]
    added = 100 * statistics.median(norm / (step - norm) for norm, step in zip(norms, steps, strict=True))
    times = statistics.median(a / b for a, b in zip(steps, plain.seconds[WARM:]))
    print(f"{dtype}: step {1e3 * statistics.median(steps):.1f} ms, norm and finite check "
          f"{1e3 * statistics.median(norms):.1f} ms, {added:.1f} % of the rest; clipping: {times:.3f} times the step")
    return added, times


def main():
    added, times = zip(*(measure(dtype) for dtype in ("bf16", "fp32")))
    model = next(line.split(": ")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    print(json.dumps({"name": "norm_overhead", "value": round(max(added), 2), "target": 10, "unit": "%",
                      "better": "lower", "clipping_times": round(max(times), 3),
                      "against": "the step without the norm and the finite check",
                      "machine": f"{model}, {os.cpu_count()} cores"}))


if __name__ == "__main__":
    main()
