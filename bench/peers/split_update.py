#!/usr/bin/env python3
"""split_update.py NAME: what offloading changes and moves, on one GPU; its own measure, without a peer.

    split_update_bits_equal  how many modes end 20 steps with the losses, weights, masters and moments of a run with
                             everything on the device, bit for bit
    pcie_bytes_vs_formula    bytes counted between GPU and host memory over those of jobs.crossing; the worst share
"""
import hashlib
import json
import os
import sys
import tempfile

import jobs
import runner

BITS, BYTES = "split_update_bits_equal", "pcie_bytes_vs_formula"
MICRO_BATCHES = (1, 3)
STEPS = 20
# Small enough that the matrices of this model are sharded and cut into many parts.
CUT = {jobs.Z + "stage": 3, jobs.Z + "param_persistence_threshold": 1000, jobs.Z + "sub_group_size": 2**14,
       jobs.Z + "max_reuse_distance": 0, "log_level": "warn"}
ON_CPU = {jobs.O + "device": "cpu", jobs.O + "pin_memory": True}
PARAMS_ON_CPU = {**ON_CPU, jobs.P + "device": "cpu", jobs.P + "pin_memory": True}


def split(share=None):
    """None: a measured one."""
    return {jobs.SPLIT: True, **({} if share is None else {jobs.SHARE: share})}


MODES = {  # beside everything on the device
    "split master": jobs.SPLIT_MASTER,
    "optimizer on CPU": ON_CPU,
    "optimizer on CPU, not pinned": {jobs.O + "device": "cpu"},
    "optimizer on CPU, split master": {**ON_CPU, **jobs.SPLIT_MASTER},
    "split update, share 0.25": {**ON_CPU, **split(0.25)},
    "split update, share 0.5": {**ON_CPU, **split(0.5)},
    "split update, share 1": {**ON_CPU, **split(1.0)},
    "split update, measured share": {**ON_CPU, **split()},
    "split update, share 0.5, split master": {**ON_CPU, **split(0.5), **jobs.SPLIT_MASTER},
    "ratio 0.5": {**ON_CPU, jobs.RATIO: 0.5},
    "ratio 0.5, split update": {**ON_CPU, jobs.RATIO: 0.5, **split()},
    "device_state_budget": {**ON_CPU, jobs.BUDGET: 3 * 10**6},
    "params on CPU": PARAMS_ON_CPU,
    "params on CPU, split update, share 0.5": {**PARAMS_ON_CPU, **split(0.5)},
    "params on CPU, split update, measured share": {**PARAMS_ON_CPU, **split()},
    "params on CPU, split update, split master": {**PARAMS_ON_CPU, **split(0.5), **jobs.SPLIT_MASTER},
}


def system(settings, micro_batches, device, folder, make=None):
    """systems.Strata over the model of the job `tiny`, or over what make(place) puts into its place."""
    import systems
    job = jobs.Job("", "tiny", (), batch=2, micro_batches=micro_batches, gpus=int(device.type == "cuda"))
    place = systems.Place(job, jobs.strata("", {}), {**CUT, **settings}, device, 0, folder)
    if make:
        make(place)
    return systems.Strata(place)


def digest(settings, micro_batches, device, steps=STEPS):
    """Of all that a run leaves behind, and of its losses."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    found = hashlib.sha256()

    def add(tensor):
        found.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    with tempfile.TemporaryDirectory() as folder, sdpa_kernel(SDPBackend.MATH):
        trained = system(settings, micro_batches, device, folder)
        for _ in range(steps):
            add(trained.step())
        for name, _ in trained.model.named_parameters():
            for array in ("weight", "master", "exp_avg", "exp_avg_sq"):
                add(trained.engine.read(name, array))
        trained.close()
    return found.hexdigest()[:16]


def compare(device):
    differ = []
    for micro_batches in MICRO_BATCHES:
        wanted = digest({}, micro_batches, device)
        for name, settings in MODES.items():
            equal = digest(settings, micro_batches, device) == wanted
            print(f"{micro_batches} micro-batches, {name}: {'equal' if equal else 'DIFFERENT'}", flush=True)
            differ += [] if equal else [f"{micro_batches} micro-batches, {name}"]
    count = len(MICRO_BATCHES) * len(MODES)
    return {"value": count - len(differ), "target": count, "unit": "modes", "better": "higher", "different": differ,
            "against": f"everything on the device, {STEPS} steps of a small GPT in bf16"}


def matrices(place):
    """A model whose units are 16 sub-groups each, so that every share below is a whole number of them."""
    import torch
    import gpt

    class Block(gpt.Block):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.fc = torch.nn.Linear(512, 512, bias=False)

        def forward(self, x):
            return self.fc(x)

    class Chain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.h = torch.nn.Sequential(*[Block() for _ in range(4)])

        def forward(self, x, y):
            return (self.h(x).float() - y).square().mean()

    torch.manual_seed(1)
    with place.device:
        place.model, place.data = Chain(), [torch.ones(8, 512, dtype=torch.bfloat16), torch.zeros(8, 512)]


def counted(settings, micro_batches, device):
    """(bytes a step between GPU and host memory by the counters, params)"""
    cpu, totals, steps = 1, [], 4  # the tier's place in the counters
    with tempfile.TemporaryDirectory() as folder:
        trained = system(settings, micro_batches, device, folder, matrices)
        for _ in range(2):
            for _ in range(steps):
                trained.step()
            trained.wait()
            counters = trained.engine.core.counters()
            totals.append(counters.tier_read[cpu] + counters.tier_write[cpu])
        params = sum(param.numel() for param in trained.model.parameters())
        trained.close()
    return (totals[1] - totals[0]) / steps, params


def ratio(settings, micro_batches, device):
    bytes_, params = counted(settings, micro_batches, device)
    return bytes_ / (params * jobs.crossing(micro_batches, False, jobs.share_of(settings), False))


def weigh(device):
    ratios = {}
    for micro_batches in MICRO_BATCHES:
        for share in (0.0, 0.25, 0.5, 1.0):
            name = f"{micro_batches} micro-batches, share {share:g}"
            ratios[name] = ratio({**ON_CPU, **split(share)}, micro_batches, device)
            print(f"{name}: {ratios[name]:.9f}", flush=True)
    worst = max(ratios.values(), key=lambda value: abs(value - 1))
    return {"value": round(worst, 9), "target": 1.0, "unit": "x", "better": "equal", "ratios": ratios,
            "against": "2 + 2 bytes per param, 2 more for each further micro-batch, and for the share that the GPU "
                       "updates 24, or 26 with several"}


def obstacle(machine):
    """Why nothing can be measured; "" if it can."""
    plugins = runner.LIBRARY.parent / "plugins"
    missing = [name for name in ("device_cuda", "optim_adamw_cuda") if not (plugins / f"{name}.so").exists()]
    if not machine["versions"]["torch"]:
        return f"no torch in {sys.executable}"
    return f"{', '.join(missing)} not in {plugins}" if missing else "" if machine["gpus"] else "torch sees no GPU"


def main():
    name, machine = sys.argv[1], runner.describe_machine()
    measure = {BITS: compare, BYTES: weigh}[name]
    result = {"name": name, "value": None, "machine": machine["machine"]}
    if reason := obstacle(machine):
        print(f"skipped: {reason}\n" + json.dumps({**result, "skipped": reason}))
        sys.exit(77)
    os.environ.update(runner.environment(), CUBLAS_WORKSPACE_CONFIG=":4096:8")
    sys.path.insert(0, str(runner.ROOT / "hosts" / "python"))
    import torch
    torch.use_deterministic_algorithms(True)
    result.update(measure(torch.device("cuda", 0)))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
