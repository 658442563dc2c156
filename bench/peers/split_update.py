#!/usr/bin/env python3
"""split_update.py NAME: what offloading changes and moves, on one GPU; its own measure, without a peer.

    split_update_bits_equal  how many modes end 20 steps with the losses, weights, masters and moments of a run with
                             everything on the device, bit for bit
    pcie_bytes_vs_formula    bytes counted between GPU and host memory over those of the table in docs/offload.md; the
                             worst placement
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
BLOCKS, WIDTH = 4, 512  # of the model whose bytes are counted
STATE = 12 * BLOCKS * WIDTH**2
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
            self.fc = torch.nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x):
            return self.fc(x)

    class Chain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.h = torch.nn.Sequential(*[Block() for _ in range(BLOCKS)])

        def forward(self, x, y):
            return (self.h(x).float() - y).square().mean()

    torch.manual_seed(1)
    with place.device:
        place.model, place.data = Chain(), [torch.ones(8, WIDTH, dtype=torch.bfloat16), torch.zeros(8, WIDTH)]


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


def formula(settings, micro_batches, params):
    """Bytes a step of the model of `matrices`, by the table of docs/offload.md."""
    split_master, there = settings.get(jobs.LAYOUT) == "split", settings.get(jobs.P + "device") == "cpu"
    kept = settings.get(jobs.BUDGET, 0) / STATE  # of all params
    updated = jobs.crossing(micro_batches, split_master, jobs.share_of(settings), there)
    # A unit has a fetch in the forward and one in the backward; of two in a row, where one follows on the other, the
    # second finds it on the GPU.
    gathers = 2 * BLOCKS * micro_batches - (2 * micro_batches - 1)
    return params * ((1 - kept) * updated + (2 * gathers / BLOCKS if there else 0))


def ratio(settings, micro_batches, device):
    bytes_, params = counted(settings, micro_batches, device)
    return bytes_ / formula(settings, micro_batches, params)


def weighed():
    """(name, settings, micro-batches) of what `weigh` counts."""
    for micro_batches in MICRO_BATCHES:
        for where, settings in (("", ON_CPU), (", params on CPU", PARAMS_ON_CPU)):
            for share in (0.0, 0.25, 0.5, 1.0):
                name = f"{micro_batches} micro-batches, share {share:g}{where}"
                yield name, {**settings, **split(share)}, micro_batches
                yield name + ", split master", {**settings, **split(share), **jobs.SPLIT_MASTER}, micro_batches
    for share in (0.0, 0.5):  # whole blocks; with several micro-batches what is left over would keep sums
        yield f"half of the state kept, share {share:g}", {**ON_CPU, **split(share), jobs.BUDGET: STATE // 2}, 1


def weigh(device):
    ratios = {}
    for name, settings, micro_batches in weighed():
        ratios[name] = ratio(settings, micro_batches, device)
        print(f"{name}: {ratios[name]:.9f}", flush=True)
    worst = max(ratios.values(), key=lambda value: abs(value - 1))
    return {"value": round(worst, 9), "target": 1.0, "unit": "x", "better": "equal", "ratios": ratios,
            "against": "the table in docs/offload.md: shares 0, 0.25, 0.5 and 1, params on the GPU and on the CPU, "
                       "whole and split master, 1 and 3 micro-batches, half of the state kept on the GPU"}


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
