"""After a backward that raised: nothing of it is in the next step, and nobody steps with a part of it by mistake."""
import pytest
import torch
from torch import nn

import small_gpt
import strata
import strata.torch


class Oops(Exception):
    pass


def raise_oops(_):
    raise Oops("out of memory, say")


class Wide(nn.Module):
    """A unit of several params, the first of which are done when the backward comes to the last."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.fail = False

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 0 and self.fail and x.requires_grad:
                x.register_hook(raise_oops)
        return x


def wide(width=40):
    with small_gpt.RANDOM, torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(Wide(width), nn.Linear(width, 4), Wide(4))


def loss_of(model, number, rank=0, fail=False):
    """Of a batch; with `fail` its backward raises in the last unit that it comes to."""
    model[0].fail = fail
    width = model[1].in_features
    return model(torch.randn(2, width, generator=torch.Generator().manual_seed(10 * number + rank))).square().mean()


def prepare(model, stage=1, micro=1, thread_rank=None, extra=()):
    return small_gpt.prepare(model, stage, extra, thread_rank, units=["Wide"], micro=micro)


def fail(engine, model, number):
    with pytest.raises(Oops):
        engine.backward(loss_of(model, number, engine.rank, fail=True))


def train(stage, micro=1, thread_rank=None, width=40, bad=None, extra=()):
    """Three steps; before each, bad(engine, model) does what must leave no trace."""
    model = wide(width)
    with prepare(model, stage, micro, thread_rank, extra) as engine:
        for step in range(3):
            if bad:
                bad(engine, model)
                engine.zero_grad()
            for part in range(micro):
                engine.backward(loss_of(model, 100 + 10 * step + part, engine.rank))
            engine.step()
        assert engine.core.info().applied_steps == 3
        return engine.state_dict()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("micro", [1, 2])
def test_the_step_after_zero_grad_knows_nothing_of_it(stage, micro):
    def in_the_first(engine, model):
        fail(engine, model, 1)

    def in_the_last(engine, model):
        for part in range(micro - 1):
            engine.backward(loss_of(model, part))
        fail(engine, model, 1)

    clean = train(stage, micro)
    assert same(train(stage, micro, bad=in_the_first), clean)
    assert same(train(stage, micro, bad=in_the_last), clean)


def test_large_gradients_that_were_handed_over():
    """More than strata.torch holds back: the engine has them when the backward raises."""
    width = 1100
    assert width * width * 4 > strata.torch.gradients.HELD
    assert same(train(1, width=width, bad=lambda e, m: fail(e, m, 1)), train(1, width=width))


def test_gradients_left_in_place():
    extra = ["zero_optimization.contiguous_gradients=false"]
    assert same(train(1, extra=extra, bad=lambda e, m: fail(e, m, 1)), train(1, extra=extra))


@pytest.mark.parametrize("stage", [1, 3])
def test_on_two_ranks_where_all_raise(stage):
    def run(bad):
        return strata.run_threads(2, lambda rank: train(stage, 2, rank, bad=bad))[0]

    assert same(run(lambda e, m: fail(e, m, 1)), run(None))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_on_two_ranks_where_one_raises(stage):
    """The other has ended its micro-batch, and drops it too."""
    def bad(engine, model):
        if engine.rank == 1:
            fail(engine, model, 1)
        else:
            engine.backward(loss_of(model, 1))

    def run(bad):
        return strata.run_threads(2, lambda rank: train(stage, 2, rank, bad=bad))[0]

    assert same(run(bad), run(None))


def test_a_rank_that_had_no_backward_joins():
    def bad(engine, model):
        if engine.rank == 1:
            fail(engine, model, 1)
        else:
            loss_of(model, 1)  # a forward, as the other's: it gathers what the last step changed
            engine.core.drop_gradients()

    def run(bad):
        return strata.run_threads(2, lambda rank: train(1, 1, rank, bad=bad))[0]

    assert same(run(bad), run(None))


def test_without_zero_grad_it_is_an_error(tmp_path):
    model = wide()
    with prepare(model) as engine:
        fail(engine, model, 1)
        for what, call in (("backward", lambda: engine.backward(loss_of(model, 2))), ("step", engine.step),
                           ("save", lambda: engine.save(tmp_path, "a")), ("load", lambda: engine.load(tmp_path)),
                           ("grad", lambda: engine.grad("1.weight")),
                           ("write", lambda: engine.write("1.bias", torch.zeros(4))),
                           ("load_state_dict", lambda: engine.load_state_dict({}, strict=False))):
            with pytest.raises(strata.FailedPrecondition, match=rf"engine.{what}: a backward raised \(Oops: out of "
                                                                rf"memory, say\).* call engine.zero_grad\(\), which"):
                call()
        with torch.no_grad():
            loss_of(model, 2)
        engine.zero_grad()
        engine.save(tmp_path, "a")
        engine.backward(loss_of(model, 2))
        engine.step()


def test_the_message_says_that_all_ranks_must_call():
    def work(rank):
        model = wide()
        with prepare(model, thread_rank=rank) as engine:
            fail(engine, model, 1)
            with pytest.raises(strata.FailedPrecondition, match=r"call engine.zero_grad\(\) on all 2 ranks"):
                engine.step()
            engine.zero_grad()
            engine.backward(loss_of(model, 2))
            engine.step()

    strata.run_threads(2, work)


def test_an_interrupt_is_one_too():
    model = wide()
    with prepare(model) as engine:
        loss = loss_of(model, 1)
        model[0].layers[0].weight.register_hook(lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.backward(loss)
        with pytest.raises(strata.FailedPrecondition, match="KeyboardInterrupt"):
            engine.step()


def test_a_backward_that_gave_nothing_leaves_nothing():
    """Refused before its first gradient: what came before it stays good."""
    def run(refused):
        model = wide()
        with prepare(model, micro=2) as engine:
            old = loss_of(model, 5)
            for part in range(2):
                engine.backward(loss_of(model, part))
            engine.step()
            engine.backward(loss_of(model, 7))
            if refused:
                with pytest.raises(strata.FailedPrecondition, match="has changed the weights"):
                    engine.backward(old)
            engine.backward(loss_of(model, 8))
            if refused:
                with pytest.raises(strata.FailedPrecondition, match="2 micro-batches .* are in: call engine.step"):
                    engine.backward(loss_of(model, 9))
            engine.step()
            return engine.state_dict()

    assert same(run(True), run(False))


def test_zero_grad_in_the_middle_of_a_step_is_torchs():
    def run(dropped):
        model = wide()
        with prepare(model, micro=2) as engine:
            engine.zero_grad()
            loss = loss_of(model, 3) if dropped else None
            if dropped:
                engine.backward(loss)
                engine.clip_grad_norm_(1e-9)
                engine.zero_grad()
                engine.zero_grad()
            for part in range(2):
                engine.backward(loss_of(model, part))
            engine.step()
            return engine.state_dict()

    assert same(run(True), run(False))


def test_fetches_stay_alike_after_it():
    """At stage 3: the forward whose backward raised is forgotten, on the rank where it did and in the counters."""
    model = wide()
    with prepare(model, 3) as engine:
        def counted():
            before = engine.core.counters().fetches
            engine.backward(loss_of(model, 4))
            engine.step()
            return engine.core.counters().fetches - before

        counted()
        usual = counted()
        fail(engine, model, 1)
        engine.zero_grad()
        assert counted() == usual
