"""Where things lie, and how they are cut, never changes a bit; and 50 steps are those of plain PyTorch.

Runs on the CPU, and on one and two GPUs where they are, with torch's deterministic algorithms.
"""
import pytest

import small_gpt
import strata
from comparisons import assert_plain, assert_same_run
from torch_ranks import TorchJob, deterministic_cuda, on_gpus

STEPS = 50
ZERO = "zero_optimization"
OFFLOAD = [f"{ZERO}.offload_optimizer.device=cpu"]
OFFLOAD_ALL = OFFLOAD + [f"{ZERO}.offload_param.device=cpu"]
PLACEMENTS = [
    (0, []), (1, []), (2, []), (3, []), (1, OFFLOAD), (2, OFFLOAD), (3, OFFLOAD), (3, OFFLOAD_ALL),
    (2, [f"{ZERO}.reduce_bucket_size=64"]), (3, [f"{ZERO}.reduce_bucket_size=64"]),
    (3, [f"{ZERO}.reduce_bucket_size=1e9"]), (3, [f"{ZERO}.sub_group_size=3000"]),
    (3, [f"{ZERO}.sub_group_size=7", *OFFLOAD_ALL]), (3, [f"{ZERO}.prefetch_bucket_size=0"]),
    (3, [f"{ZERO}.overlap_comm=false"]), (1, [f"{ZERO}.overlap_comm=false"]),
    (3, [f"{ZERO}.max_live_parameters=20000", f"{ZERO}.max_reuse_distance=0"]),
    (3, [f"{ZERO}.param_persistence_threshold=100"]), (3, [f"{ZERO}.contiguous_gradients=false"])]
# Part of an offloaded update on the device, which must have memory of its own. A block's state is about 150,000 bytes.
SPLIT, CUT = f"{ZERO}.offload_optimizer.split_update=true", f"{ZERO}.sub_group_size=2048"
SHARE, RATIO, BUDGET = (f"{ZERO}.offload_optimizer.{key}=" for key in ("split_share", "ratio", "device_state_budget"))
DEVICE_PARTS = [
    (3, [*OFFLOAD, SPLIT, SHARE + "0.5", CUT]), (3, [*OFFLOAD_ALL, SPLIT, SHARE + "0.5", CUT]),
    (3, [*OFFLOAD, BUDGET + "2e5", SPLIT, CUT]), (3, [*OFFLOAD, SPLIT, SHARE + "0.25", CUT]),
    (3, [*OFFLOAD, SPLIT, SHARE + "1"]), (3, [*OFFLOAD_ALL, SPLIT]), (2, [*OFFLOAD, SPLIT]),
    (1, [*OFFLOAD, SPLIT, CUT]), (3, [*OFFLOAD, RATIO + "0.5"]), (2, [*OFFLOAD, RATIO + "0"]),
    (3, [*OFFLOAD, BUDGET + "2e5"]), (3, [*OFFLOAD_ALL, BUDGET + "2e5"]),
    (3, [*OFFLOAD_ALL, BUDGET + "2e5", SPLIT, CUT])]
WHERE = [pytest.param("cpu", 1, id="cpu"), pytest.param("cpu", 2, id="2 ranks"),
         pytest.param("cuda", 1, id="GPU", marks=on_gpus(1)), pytest.param("cuda", 2, id="2 GPUs", marks=on_gpus(2))]


def train(folder, device, world, stage, extra=(), **options):
    """[(losses, state dict)] by rank."""
    if device == "cuda" and world > 1:  # NCCL wants a process per GPU
        with TorchJob(folder, world, stage=stage, extra=list(extra), steps=STEPS, cuda=True, model=options) as job:
            return [run[:2] for run in job.results()]
    if device == "cuda":
        deterministic_cuda()
        extra = small_gpt.on_cuda(extra)
    return strata.run_threads(world, lambda rank: small_gpt.train(stage, STEPS, thread_rank=rank, extra=extra,
                                                                  **options))


@pytest.mark.parametrize("device, world", WHERE)
def test_the_same_bits_at_every_placement(tmp_path, device, world):
    options = {"layers": 2, "tied": world == 1}
    reference = train(tmp_path, device, world, 0, **options)
    # One rank on the CPU has little to place, two on GPUs are processes that take seconds to start: some will do.
    every = (device, world) in (("cpu", 2), ("cuda", 1))
    placements = PLACEMENTS if every else PLACEMENTS[1:4] + PLACEMENTS[7:9] + PLACEMENTS[11:15]
    if device == "cuda":
        placements = placements + (DEVICE_PARTS if every else DEVICE_PARTS[:3])
    for stage, extra in placements:
        for ours, other in zip(train(tmp_path, device, world, stage, extra, **options), reference):
            assert_same_run(ours, other, (stage, extra))


def test_micro_batches_in_fp32_give_the_same_bits():
    """With several micro-batches stages 0 and 1 accumulate elsewhere, and round elsewhere."""
    options = {"checkpointing": "nonreentrant", "bf16": True, "micro": 2}
    reference = small_gpt.train(2, 12, **options)
    for stage, extra in [placement for placement in PLACEMENTS if placement[0] >= 2][1:8]:
        assert_same_run(small_gpt.train(stage, 12, extra=extra, **options), reference, (stage, extra))


@on_gpus(1)
def test_micro_batches_of_which_the_device_updates_a_part():
    """Their sums are fp32, and cross to the host and back as such."""
    options = {"checkpointing": "nonreentrant", "bf16": True, "micro": 3}
    deterministic_cuda()
    reference = small_gpt.train(3, 12, extra=small_gpt.on_cuda(), **options)
    for stage, extra in DEVICE_PARTS:
        if stage > 1:
            assert_same_run(small_gpt.train(stage, 12, extra=small_gpt.on_cuda(extra), **options), reference, extra)


def test_parts_of_an_update_on_a_device_without_memory_of_its_own_are_refused():
    for stage, extra in DEVICE_PARTS:
        with pytest.raises(strata.FailedPrecondition, match="has no memory of its own"):
            small_gpt.train(stage, 1, extra=extra)


@pytest.mark.parametrize("device, world", WHERE)
def test_fifty_steps_are_those_of_plain_pytorch(tmp_path, device, world):
    runs = train(tmp_path, device, world, 3, OFFLOAD)
    if device == "cuda":
        deterministic_cuda()
    assert_plain([losses for losses, _ in runs], STEPS, device=device)


def test_a_communication_thread_that_is_late_changes_nothing():
    """Record 36: what is reduced while the backward goes on is what the backward handed over."""
    late = ["plugins.collective=fault", "plugin.fault.wraps=comm_local",
            "plugin.fault.rules=all_gather:*:late=2, reduce_scatter:*:late=2"]
    runs = [strata.run_threads(2, lambda rank, e=extra: small_gpt.train(stage, 5, thread_rank=rank, extra=e))
            for stage, extra in ((2, late), (3, late), (2, []), (3, []))]
    for run in runs[1:]:
        for ours, other in zip(run, runs[0]):
            assert_same_run(ours, other)
