"""Ctrl-C and sys.exit are no Exceptions, so torch calls no hook at the end of a forward: it must need nothing.

They come between any two lines, in Strata's own code, too: a trace function raises them there, one place after another.
"""
import contextlib
import pathlib
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import small_gpt
import strata
import strata.torch
from strata.torch import passes

OURS = str(pathlib.Path(strata.torch.__file__).parent)
INTERRUPTS = [KeyboardInterrupt, SystemExit]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.interrupt = None

    def forward(self, x):
        x = self.layer(x)
        if self.interrupt:
            raise self.interrupt
        return self.norm(x).tanh()


class Model(nn.Module):
    """checkpointing: what use_reentrant is; None: there is none."""

    def __init__(self, checkpointing=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 1)
        self.checkpointing = checkpointing

    def forward(self, x):
        for block in self.blocks:
            recompute = self.checkpointing is not None and torch.is_grad_enabled()
            x = checkpoint(block, x, use_reentrant=self.checkpointing) if recompute else block(x)
        return self.head(x).square().mean()


def x():
    return torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()


def prepared(checkpointing=None):
    with small_gpt.RANDOM, torch.random.fork_rng():
        torch.manual_seed(4)
        model = Model(checkpointing)
    return model, small_gpt.prepare(model, 3)


def one_step(model, engine):
    engine.backward(model(x()))
    engine.step()


def trained(checkpointing=None):
    model, engine = prepared(checkpointing)
    with engine:
        one_step(model, engine)
        return engine.state_dict()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_nothing_is_left(engine):
    left = [(unit.name, unit.fetched, unit.depth, unit.kept) for unit in engine._weights.units]
    assert not any(fetched or depth or kept for _, fetched, depth, kept in left), left
    assert not engine._passes._running and not passes._has_active_hooks()
    for p in engine.model.parameters():
        assert isinstance(p, strata.torch.ReleasedParameter)


def interrupt(model, call, error, number=1):
    model.blocks[number].interrupt = error
    with pytest.raises(error):
        call()
    model.blocks[number].interrupt = None


NEXT = {
    "forward": lambda model, engine, path: model(x()),
    "save": lambda model, engine, path: engine.save(path, "a"),
    "state_dict": lambda model, engine, path: engine.state_dict(),
    "zero_grad": lambda model, engine, path: engine.zero_grad(),
    "write": lambda model, engine, path: engine.write("head.bias", torch.zeros(1)),
    "close": lambda model, engine, path: engine.close(),
    "unit": lambda model, engine, path: torch.no_grad()(model.head)(x()),
}


@pytest.mark.parametrize("error", INTERRUPTS)
@pytest.mark.parametrize("then", NEXT)
@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_any_call_may_follow_an_interrupted_forward(tmp_path, then, checkpointing, error):
    model, engine = prepared(checkpointing)
    with engine:
        one_step(model, engine)
        interrupt(model, lambda: model(x()), error)
        NEXT[then](model, engine, tmp_path)
        assert_nothing_is_left(engine)
    assert same(trained(), trained(checkpointing))


@pytest.mark.parametrize("error", INTERRUPTS)
def test_an_interrupted_evaluation_and_parts_called_one_by_one(error):
    model, engine = prepared()
    with engine:
        with torch.no_grad():
            interrupt(model, lambda: model(x()), error)
        engine.zero_grad()
        assert_nothing_is_left(engine)
        with torch.no_grad():
            interrupt(model, lambda: model.blocks[1](x()), error)
        one_step(model, engine)
        assert_nothing_is_left(engine)

        def parts():
            with engine.forward():
                model.blocks[1](x())

        interrupt(model, parts, error)
        assert_nothing_is_left(engine)
        with engine.gathered(model.head):
            interrupt(model, lambda: model(x()), error)
            with engine.gathered(model.blocks[0]):
                assert type(model.head.weight) is nn.Parameter
            assert isinstance(model.blocks[0].layer.weight, strata.torch.ReleasedParameter)
        assert_nothing_is_left(engine)


@pytest.mark.parametrize("error", INTERRUPTS)
@pytest.mark.parametrize("checkpointing", [True, False])
def test_an_interrupt_while_the_backward_computes_a_block_again(checkpointing, error):
    model, engine = prepared(checkpointing)
    with engine:
        loss = model(x())
        interrupt(model, lambda: engine.backward(loss), error)
        engine.zero_grad()
        del loss  # torch's checkpoint keeps what it computed again
        one_step(model, engine)
        assert_nothing_is_left(engine)
        assert same(engine.state_dict(), trained())


def test_an_interrupt_that_the_forward_catches():
    model, engine = prepared()
    inner = model.blocks[0].forward

    def catching(x):
        with contextlib.suppress(KeyboardInterrupt):
            model.blocks[1](x)
        return inner(x)

    model.blocks[1].interrupt = KeyboardInterrupt
    with engine:
        model.blocks[0].forward = catching
        model.forward = lambda x: model.blocks[0](x)
        model(x())
        engine.zero_grad()
        assert_nothing_is_left(engine)


@pytest.mark.parametrize("close", [True, False])
def test_another_model_in_the_same_process(close):
    model, engine = prepared()
    interrupt(model, lambda: model(x()), KeyboardInterrupt)
    if close:
        engine.close()
    other, its_engine = prepared()
    with its_engine:
        one_step(other, its_engine)
        assert same(its_engine.state_dict(), trained())
    engine.close()
    assert_nothing_is_left(engine)


class Interrupter:
    """Raises in the number-th line of Strata's that runs; `line` is where."""

    def __init__(self, number, error):
        self.left, self.error, self.line = number, error, None

    def __call__(self, frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(OURS) or code.co_name in ("<genexpr>", "gathered"):  # Python's own
            return None
        if event in ("line", "return"):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                self.line = f"{frame.f_code.co_filename.removeprefix(OURS)}:{frame.f_lineno} {event}"
                raise self.error
        return self


def interrupted_at(number, call, error=KeyboardInterrupt):
    """Where, or None: the call is over before that."""
    interrupter = Interrupter(number, error)
    before = sys.gettrace()
    sys.settrace(interrupter)
    was_raised = False
    try:
        call()
    except error:
        was_raised = True
    finally:
        sys.settrace(before)
    assert was_raised or interrupter.line is None, f"the interrupt in {interrupter.line} was lost"
    return interrupter.line


EVERY = 11  # lines are too many to try each


@pytest.mark.parametrize("checkpointing", [None, False])
@pytest.mark.parametrize("during", ["forward", "backward", "gathered"])
def test_an_interrupt_at_any_line(during, checkpointing, tmp_path):
    model, engine = prepared(checkpointing)
    places, number = set(), 1

    def gradients():
        engine.backward(model(x()))
        found = {name: engine.grad(name) for name, _ in model.named_parameters()}
        engine.zero_grad()
        return found

    def gathered():
        with engine.gathered():
            pass

    with engine:
        expected = gradients()
        while True:
            loss = model(x()) if during == "backward" else None
            call = {"forward": lambda: model(x()), "backward": lambda: engine.backward(loss), "gathered": gathered}
            line = interrupted_at(number, call[during])
            del loss, call
            engine.zero_grad()
            if line is None:
                break
            places.add(line)
            assert same(gradients(), expected), line
            assert_nothing_is_left(engine)
            number += EVERY
        engine.save(tmp_path, "a")
    assert len(places) > 20
