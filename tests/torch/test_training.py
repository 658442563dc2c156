"""The numbers: losses against plain PyTorch with an fp32-master AdamW, and settings that change them."""
import math
import pytest
import torch
from torch import nn

import small_gpt
import strata
from comparisons import assert_plain, assert_same_run, gap
from torch_ranks import TorchJob

STEPS = 30
OFFLOAD = ["zero_optimization.offload_optimizer.device=cpu"]


# ---- against plain PyTorch -------------------------------------------------------------------------------------------

MODELS = [{}, {"tied": True}, {"checkpointing": "reentrant"}, {"checkpointing": "nonreentrant", "tied": True}]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", MODELS, ids=str)
def test_as_plain_pytorch(options, bf16):
    losses, _ = small_gpt.train(3, STEPS, bf16=bf16, **options)
    assert_plain([losses], STEPS, bf16=bf16, **options)


def test_as_plain_pytorch_on_two_ranks_with_micro_batches():
    runs = strata.run_threads(2, lambda rank: small_gpt.train(3, STEPS, micro=2, thread_rank=rank))
    assert_plain([run[0] for run in runs], STEPS, micro=2)


def freeze(model):
    """The embeddings, a whole block, and single params of another."""
    for part in (model.tokens, model.blocks[0], model.blocks[1].attention.out, model.norm):
        part.requires_grad_(False)
    return model


@pytest.mark.parametrize("checkpointing", [None, "nonreentrant"])
def test_frozen_parts(checkpointing):
    def model():
        return freeze(small_gpt.make(checkpointing=checkpointing))

    runs = strata.run_threads(2, lambda rank: small_gpt.train(3, STEPS, model=model(), thread_rank=rank))
    plain, state = small_gpt.train_plainly(STEPS, world=2, model=model())
    for rank in range(2):
        assert gap(runs[rank][0], plain[rank]) < 1e-4
    for name, value in runs[0][1].items():
        if not model().get_parameter(name).requires_grad:
            assert torch.equal(value, state[name]), name


# ---- processes -------------------------------------------------------------------------------------------------------


def test_processes_train_as_threads_do(tmp_path):
    with TorchJob(tmp_path, 2, stage=3, steps=10) as job:
        runs = job.results()
    threads = strata.run_threads(2, lambda rank: small_gpt.train(3, 10, thread_rank=rank))
    for rank in range(2):
        assert_same_run(runs[rank], threads[rank])


# ---- settings and gradients ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_micro_batches_are_all_counted(stage):
    """Record 29: integer gradients, exact sums, first and second step."""
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(5, 3))

        def forward(self, x):
            return (self.w * x).sum()

    def work(rank, micro, offload):
        model = Linear()
        with small_gpt.prepare(model, stage, thread_rank=rank, micro=micro, clip=0.0, extra=offload) as engine:
            found = []
            for step in range(2):
                total = torch.zeros(5, 3)
                for part in range(micro):
                    for other in range(2):
                        x = torch.arange(15).view(5, 3) * (1.0 + step + part) + other
                        total += x
                        if other == engine.rank:
                            mine = x
                    engine.backward(model(mine))
                grad = engine.grad(model.w)
                engine.step()
                assert torch.equal(grad, total / (2 * micro)), (micro, offload, step)
                norm = engine.core.info().grad_norm
                assert norm == pytest.approx(float((total.double() / (2 * micro)).norm()), rel=1e-6)
                found.append(engine.read(model.w))
            return found

    for micro in (1, 2, 5):
        plain, offloaded = (strata.run_threads(2, lambda rank, o=offload: work(rank, micro, o))[0]
                            for offload in ([], OFFLOAD))
        assert all(torch.equal(a, b) for a, b in zip(plain, offloaded))


def test_clip_grad_norm_and_zero_grad():
    model = small_gpt.make()
    with small_gpt.prepare(model, clip=0.5) as engine:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for step in range(2):
            optimizer.zero_grad()
            model.zero_grad(set_to_none=False)
            engine.zero_grad()
            engine.backward(model(*small_gpt.batch(step)))
            assert all(p.grad is None for p in model.parameters())
            squares = sum(float(engine.grad(p).double().square().sum()) for p in model.parameters())
            norm = engine.clip_grad_norm_(0.5)
            with pytest.raises(strata.FailedPrecondition, match="known between its engine.step"):
                float(norm)
            assert "between its engine.step() and the next" in str(norm) == repr(norm) == f"{norm}"
            assert engine.core.info().steps == step  # str() has waited for nothing
            engine.step()
            assert float(norm) == pytest.approx(squares**0.5, rel=1e-6) and norm.item() > 0.5
            assert engine.core.info().clip_factor == pytest.approx(0.5 / float(norm), rel=1e-4)
        for max_norm in (0.1, math.inf, None):  # of one step; None: the manifest's
            engine.backward(model(*small_gpt.batch(2)))
            if max_norm:
                engine.clip_grad_norm_(max_norm)
            engine.step()
            info = engine.core.info()
            assert info.clip_factor == pytest.approx(min(1, (max_norm or 0.5) / info.grad_norm), rel=1e-4)
            assert info.grad_norm > 0.5
        for wrong in (0, -1, math.nan):
            with pytest.raises(strata.InvalidArgument, match="a norm above 0 is right"):
                engine.clip_grad_norm_(wrong)


def test_the_norm_is_used_as_a_number():
    model = small_gpt.make()
    with small_gpt.prepare(model) as engine:
        engine.backward(model(*small_gpt.batch(0)))
        norm = engine.clip_grad_norm_(math.inf)
        for early in (lambda: norm > 1, lambda: norm * 2, lambda: torch.isfinite(norm), lambda: f"{norm:.3f}"):
            with pytest.raises(strata.FailedPrecondition, match="known between its engine.step"):
                early()
        engine.step()
        number = float(norm)
        assert str(norm) == repr(norm) == f"{norm}" == repr(number) and f"{norm:.3f}" == f"{number:.3f}"
        assert norm == number and number == norm and norm != 0 and 0 < norm < 1e9 and norm >= number >= norm
        assert norm + 1 == 1 + norm == number + 1 and norm / 2 == number / 2 and 2 / norm == 2 / number
        assert -norm == -number and 1 - norm == 1 - number and abs(norm) == number and norm**2 == number**2
        assert norm - norm == 0 and math.isfinite(norm) and math.sqrt(norm) == math.sqrt(number)
        assert bool(torch.isfinite(norm)) and not torch.isnan(norm)
        torch.testing.assert_close(torch.stack([norm, torch.ones(())]), torch.tensor([number, 1.0]))
        torch.testing.assert_close(torch.ones(2) * norm, torch.full((2,), number))
        small_gpt.loop(model, engine, 1)
        assert "between its engine.step() and the next" in str(norm)


def test_a_backward_of_the_backward_is_refused_by_name():
    model = small_gpt.make()
    with small_gpt.prepare(model) as engine:
        with pytest.raises(strata.InvalidArgument, match="create_graph=True.*not offered"):
            engine.backward(model(*small_gpt.batch(0)), create_graph=True)
        small_gpt.loop(model, engine, 1)


def test_groups_and_learning_rates():
    model = small_gpt.make()
    no_decay = [p for name, p in model.named_parameters() if "norm" in name]
    with small_gpt.prepare(model, groups=[{"params": no_decay, "lr": 0.0}]) as engine:
        before = engine.state_dict()
        small_gpt.loop(model, engine, 1)
        after = engine.state_dict()
        for name in after:
            assert torch.equal(before[name], after[name]) == ("norm" in name), name
        engine.param_groups[0]["lr"] = 0.0
        engine.param_groups[1]["lr"] = 0.1
        small_gpt.loop(model, engine, 1)
        last = engine.state_dict()
        for name in last:
            assert torch.equal(last[name], after[name]) == ("norm" not in name), name
        engine.backward(model(*small_gpt.batch(0)))
        engine.step(lr=0.01)
        assert not torch.equal(engine.read("head.weight"), last["head.weight"])


def test_the_float32_values_are_the_master_of_bf16_weights():
    model = small_gpt.make()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    with small_gpt.prepare(model, bf16=True) as engine:
        for name, value in values.items():
            assert torch.equal(engine.read(name, "master"), value)
            assert engine.read(name).dtype == torch.bfloat16 == model.get_parameter(name).dtype
            torch.testing.assert_close(engine.read(name).float(), value, rtol=2**-8, atol=0)


def test_rank_zeros_values_win():
    def work(rank):
        model = small_gpt.make(seed=rank.rank)
        with small_gpt.prepare(model, thread_rank=rank) as engine:
            return engine.state_dict()

    first, second = strata.run_threads(2, work)
    for name, value in small_gpt.make(seed=0).state_dict().items():
        assert torch.equal(first[name], value) and torch.equal(second[name], value)


def test_several_dtypes_in_one_model():
    def model():
        made = small_gpt.make()
        made.blocks[1].mlp.bfloat16()
        forward = made.blocks[1].mlp.forward
        made.blocks[1].mlp.forward = lambda x: forward(x.bfloat16()).float()
        return made

    runs = strata.run_threads(2, lambda rank: small_gpt.train(3, 10, model=model(), thread_rank=rank))
    whole = strata.run_threads(2, lambda rank: small_gpt.train(1, 10, model=model(), thread_rank=rank))
    plain, _ = small_gpt.train_plainly(10, world=2, model=model())
    for rank in range(2):
        assert_same_run(runs[rank], whole[rank])
        assert gap(runs[rank][0], plain[rank]) < 1e-2
    assert runs[0][1]["blocks.1.mlp.0.weight"].dtype == torch.bfloat16
