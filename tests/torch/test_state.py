"""A prepared model's state: state dicts, checkpoints at other stages and world sizes, buffers."""
import pytest
import torch
from torch import nn

import small_gpt
import strata


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(value, b[key]) for key, value in a.items())


class Normed(nn.Module):
    """Buffers of several kinds beside params."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mask", torch.ones(6, dtype=torch.bool))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x):
        return self.norm(self.inner[1](torch.tanh(self.inner[0](x))) * self.mask).square().mean()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_state_dict_is_the_models(stage):
    plain = small_gpt.make(tied=True).state_dict()

    def work(rank):
        model = small_gpt.make(tied=True)
        with small_gpt.prepare(model, stage, thread_rank=rank) as engine:
            assert bool(engine.state_dict(wanted=rank == 1)) == (rank == 1)
            return engine.state_dict()

    for state in strata.run_threads(2, work):
        assert list(state) == list(plain) and same(state, plain)
        assert state["head.weight"] is state["tokens.weight"]
        small_gpt.make(tied=True).load_state_dict(state)


def test_load_state_dict():
    other = small_gpt.make(seed=9).state_dict()

    def work(rank):
        model = small_gpt.make()
        with small_gpt.prepare(model, thread_rank=rank) as engine:
            own = engine.state_dict()
            for wrong, text in (({**other, "more": torch.ones(1)}, r"missing \[\], unexpected \['more'\]"),
                                ({k: v for k, v in other.items() if k != "norm.bias"}, r"missing \['norm.bias'\]"),
                                ({**other, "norm.bias": torch.ones(3)}, r'"norm.bias" has shape \(3,\), the model')):
                with pytest.raises(strata.InvalidArgument, match=text):
                    engine.load_state_dict(wrong)
                assert same(engine.state_dict(), own)  # nothing was changed
            partial = {"norm.bias": torch.ones(small_gpt.WIDTH), "more": torch.ones(1)}
            missing, unexpected = engine.load_state_dict(partial, strict=False)
            assert unexpected == ["more"] and "norm.weight" in missing and "norm.bias" not in missing
            assert bool((engine.read("norm.bias") == 1).all())
            # Params take rank 0's values; a half precision copy is taken as what it is.
            engine.load_state_dict(other if engine.rank == 0 else own)
            assert same(engine.state_dict(), other) and torch.equal(engine.read("head.weight", "master"),
                                                                    other["head.weight"])
            small_gpt.loop(model, engine, 1, rank=engine.rank)

    strata.run_threads(2, work)


def test_names_and_arrays_that_are_not_there():
    model = small_gpt.make()
    model.norm.bias.requires_grad_(False)
    with small_gpt.prepare(model) as engine:
        with pytest.raises(strata.NotFound, match='no param "norm.baes"'):
            engine.read("norm.baes")
        with pytest.raises(strata.NotFound, match="no param of the prepared model"):
            engine.read(nn.Parameter(torch.ones(1)))
        with pytest.raises(strata.NotFound, match='"exp_avg"'):
            engine.read("norm.bias", "exp_avg")
        assert engine.grad("norm.bias") is None
        assert engine.read("norm.weight", "exp_avg_sq").dtype == torch.float32


@pytest.mark.parametrize("stage,world", [(3, 2), (0, 1), (2, 1)])
def test_a_checkpoint_goes_on_anywhere(tmp_path, stage, world):
    def first(rank):
        model = small_gpt.make()
        with small_gpt.prepare(model, 3, thread_rank=rank) as engine:
            small_gpt.loop(model, engine, 3)
            engine.save(tmp_path / f"{stage}{world}", "three")
            return engine.state_dict(), small_gpt.loop(model, engine, 3), engine.state_dict()

    def second(rank):
        model = small_gpt.make(seed=5)
        with small_gpt.prepare(model, stage, thread_rank=rank) as engine:
            engine.load(tmp_path / f"{stage}{world}")
            return engine.state_dict(), small_gpt.loop(model, engine, 3), engine.state_dict()

    saved, losses, end = strata.run_threads(2, first)[0]
    for state, again, final in strata.run_threads(world, second):
        assert same(state, saved)
        assert again == losses and same(final, end)  # both ranks see the same batches: the mean is the same


def test_buffers_are_left_alone_and_travel(tmp_path):
    x = torch.linspace(-1, 2, 24).view(4, 6)
    plain = Normed()
    model = Normed()
    buffers = dict(model.named_buffers())
    with small_gpt.prepare(model) as engine:
        assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
        for name, p in plain.named_parameters():
            p.data.copy_(engine.read(name))
        engine.backward(model(x))
        plain(x)
        engine.step()
        for name, buffer in plain.named_buffers():
            assert torch.equal(buffer, buffers[name]), name
        assert set(engine.state_dict()) == set(plain.state_dict())
        engine.save(tmp_path, "one")
        saved = engine.state_dict()
        engine.backward(model(3 * x))
        engine.step()
        assert not same(engine.state_dict(), saved)
        engine.load(tmp_path, "one")
        assert same(engine.state_dict(), saved)
    other = Normed()
    other.register_buffer("more", torch.ones(2))
    with small_gpt.prepare(other) as engine:
        with pytest.raises(strata.InvalidArgument, match="the checkpoint has buffers"):
            engine.load(tmp_path, "one")


def test_saving_in_the_middle_is_refused(tmp_path):
    model = small_gpt.make()
    with small_gpt.prepare(model, micro=2) as engine:
        engine.backward(model(*small_gpt.batch(0)))
        with pytest.raises(strata.FailedPrecondition, match="micro-batches of an unfinished step"):
            engine.save(tmp_path, "half")
        model.blocks[0].mlp[0].register_forward_hook(lambda *_: engine.save(tmp_path, "inside"))
        with pytest.raises(strata.FailedPrecondition, match='engine.save: called while the forward of unit "blocks.0"'):
            model(*small_gpt.batch(0))


def test_closing():
    model = small_gpt.make()
    engine = small_gpt.prepare(model)
    loss = model(*small_gpt.batch(0))
    engine.close()
    engine.close()
    for call in (lambda: model(*small_gpt.batch(0)), lambda: engine.backward(loss), engine.step, engine.state_dict):
        with pytest.raises(strata.FailedPrecondition, match="closed"):
            call()
