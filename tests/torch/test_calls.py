"""How often strata.torch calls the engine: gradients and views of a unit in one call each, with the same numbers."""
import pytest
import torch
from torch import nn

import small_gpt
import strata
from strata.torch import gradients, memory


def train(stage, steps=3, watch=None):
    """{name: weight} after some steps; `watch` sees the engine before them."""
    model = small_gpt.make()
    with small_gpt.prepare(model, stage=stage) as engine:
        if watch:
            watch(engine)
        for step in range(steps):
            engine.backward(model(*small_gpt.batch(step)))
            engine.step()
        return engine.state_dict()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_gradients_of_a_unit_are_one_call(stage, monkeypatch):
    calls = []

    def watch(engine):
        hand_over, units = engine._gradients._grads, engine._weights.units
        calls.append(sum(unit.trainable > 0 for unit in units))
        monkeypatch.setattr(engine._gradients, "_grads", lambda *a: (calls.append(a[0]), hand_over(*a)))

    together = train(stage, watch=watch)
    units, *counts = calls
    assert len(counts) == 3 * units and max(counts) > 4
    calls.clear()
    monkeypatch.setattr(gradients, "HELD", 1)
    assert same(train(stage, watch=watch), together)
    assert set(calls[1:]) == {1}


def test_large_gradients_do_not_wait(monkeypatch):
    """What is held is bounded, by bytes."""
    limit, held = 3000, []
    monkeypatch.setattr(gradients, "HELD", limit)

    def watch(engine):
        hand_over = engine._gradients._grads
        monkeypatch.setattr(engine._gradients, "_grads",
                            lambda *a: (held.append([g.nbytes for g in engine._gradients._held]), hand_over(*a)))

    train(0, watch=watch)
    assert all(sum(sizes[:-1]) < limit for sizes in held)
    assert any(len(sizes) > 1 for sizes in held) and any(sizes[-1] >= limit for sizes in held)


class Sometimes(nn.Module):
    """A unit of which some params have no gradient, so that it is complete at the end of backward only."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def test_a_unit_that_is_never_complete_is_handed_over_at_the_end():
    torch.manual_seed(1)
    model = nn.Sequential(Sometimes(), Sometimes())
    x = torch.randn(3, 4)
    model(x).square().mean().backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    with strata.torch.prepare(model, text=small_gpt.text(), units=Sometimes) as engine:
        engine.backward(model(x).square().mean())
        for name, gradient in want.items():
            torch.testing.assert_close(engine.grad(name), torch.zeros(()).expand(engine.grad(name).shape)
                                       if gradient is None else gradient)
        engine.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_tensors_over_weights_are_made_once(stage, monkeypatch):
    made = []

    class Counted(memory.Place):
        def __init__(self, *args):
            made.append(args)
            super().__init__(*args)

    monkeypatch.setattr(memory, "Place", Counted)
    train(stage, steps=2)
    after_two = len(made)
    made.clear()
    train(stage, steps=6)
    assert len(made) == after_two > 0


def test_the_device_of_an_engine():
    model = small_gpt.make()
    with small_gpt.prepare(model) as engine:
        device = engine.core.device
        assert (device.type, device.device_id) == ("cpu", 0)
        assert device.total_bytes > device.free_bytes > 0
        assert device.held_bytes == sum(item.bytes for item in engine.core.plan() if item.tier == "device")
