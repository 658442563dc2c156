"""When units are fetched and released around forward and backward, and what becomes of saved weights."""
import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import small_gpt
import strata
import strata.torch

CHECKPOINTING = [None, "reentrant", "nonreentrant"]


def on_two_ranks(work):
    return strata.run_threads(2, work)


def held(engine):
    return [unit.name for unit in engine._weights.units if unit.fetched]


# ---- how often -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 50_000_000])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_two_gathers_per_unit_and_micro_batch(checkpointing, tied, prefetch):
    """Embeddings need none in backward. The first backward unit may still lie there from the forward: that is the
    engine's reuse, from the second step on, when it knows the order."""
    def work(rank):
        model = small_gpt.make(checkpointing=checkpointing, tied=tied)
        with small_gpt.prepare(model, thread_rank=rank, micro=2, extra=[
                "zero_optimization.max_reuse_distance=0", f"zero_optimization.prefetch_bucket_size={prefetch}"]) as e:
            counted = []
            for _ in range(3):
                small_gpt.loop(model, e, 1, micro=2, rank=e.rank)
                assert held(e) == []
                counted.append(e.core.counters(last_step=True))
            return counted

    first, *later = on_two_ranks(work)[0]
    units, embeddings = 7, 2
    assert first.fetches == first.gather_calls == 2 * (2 * units - embeddings)
    for c in later:
        assert c.fetches == 2 * (2 * units - embeddings)
        assert c.gather_calls == 2 * (2 * units - embeddings - 1) and c.prefetch_dropped == 0


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_two_gathers_of_units_inside_units(checkpointing, frozen):
    """The outer unit is needed before and after the inner one, in both directions."""
    def work(rank):
        model = small_gpt.make(checkpointing=checkpointing)
        for name, p in model.blocks.named_parameters():
            p.requires_grad_(not frozen or "bias" in name)
        with small_gpt.prepare(model, thread_rank=rank, units=["Block", "Attention"], extra=[
                "zero_optimization.max_reuse_distance=0"]) as e:
            small_gpt.loop(model, e, 1, rank=e.rank)
            assert held(e) == []
            return e.core.counters(last_step=True).gather_calls

    assert on_two_ranks(work)[0] == 2 * 10 - 2


class Chain(nn.Module):
    """Blocks one after the other, `span` of them in a checkpoint; spans in a list nest: [[1], 2] is 1 inside of 3."""

    def __init__(self, blocks, span, use_reentrant, frozen=False):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(blocks))
        self.span, self.use_reentrant = span, use_reentrant
        for name, p in self.named_parameters():
            p.requires_grad_(not frozen or "2.bias" in name)

    def forward(self, x):
        done = 0
        while done < len(self.blocks):
            x, done = self.part(x.requires_grad_(), self.span, done), done + count(self.span)
        return x.square().mean()

    def part(self, x, span, first):
        return checkpoint(self.run, x, span, first, use_reentrant=self.use_reentrant)

    def run(self, x, span, first):
        if isinstance(span, int):
            for block in self.blocks[first:first + span]:
                x = block(x)
            return x
        for inner in span:
            x = self.part(x, inner, first) if isinstance(inner, list) else self.run(x, inner, first)
            first += count(inner)
        return x


def count(span):
    return span if isinstance(span, int) else sum(map(count, span))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("world, reuse", [(1, 0), (2, 0), (2, 10**9)])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("span", [1, 2, 4, 8, [[1], 1], [[[1], 1], 2], [1, [3]]], ids=str)
def test_two_gathers_however_many_units_a_checkpoint_spans(span, use_reentrant, frozen, world, reuse):
    """Also in nested checkpoints, where a unit is computed three times and more. The memory for it is that of the units
    of one checkpoint, which is all that max_live_parameters allows here."""
    def make():
        with small_gpt.RANDOM, torch.random.fork_rng():
            torch.manual_seed(5)
            return Chain(8, span, use_reentrant, frozen)

    plain = make()
    plain(torch.linspace(-1, 1, 16).view(2, 8)).backward()
    together = count(span)
    live = together * 2048 * world * (2 if frozen else 1)  # of a unit: shards of 2048 elements; frozen params' apart

    def work(rank):
        model = make()
        seen = {}
        with small_gpt.prepare(model, thread_rank=rank, extra=[
                f"zero_optimization.max_reuse_distance={reuse}", f"zero_optimization.max_live_parameters={live}"]) as e:
            for i, block in enumerate(model.blocks):
                block[2].bias.register_post_accumulate_grad_hook(lambda _, i=i: seen.update({i: held(e)}))
            counted = []
            for step in range(3):
                e.backward(model(torch.linspace(-1, 1, 16).view(2, 8)))
                assert held(e) == []
                if step == 0:
                    gradients = {name: e.grad(name) for name, p in model.named_parameters() if p.requires_grad}
                e.step()
                counted.append(e.core.counters(last_step=True))
            return counted, gradients, seen

    counted, gradients, seen = strata.run_threads(world, work)[0]
    assert [c.fetches for c in counted] == [16, 16, 16]
    if world == 2:
        assert counted[0].gather_calls == 16 and all(c.gather_calls <= 15 for c in counted[1:])
        assert reuse or [c.gather_calls for c in counted] == [16, 15, 15]
    for i, names in seen.items():
        first = i // together * together
        assert set(names) <= {f"blocks.{n}" for n in range(first, first + together)}, i
    for name, grad in gradients.items():
        torch.testing.assert_close(grad, plain.get_parameter(name).grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_of_more_units_than_may_be_live_is_refused(use_reentrant):
    def work(rank):
        model = Chain(8, 4, use_reentrant)
        with small_gpt.prepare(model, thread_rank=rank, extra=[
                f"zero_optimization.max_live_parameters={3 * 4096}"]) as engine:
            with pytest.raises(strata.ResourceExhausted, match="12288 elements are fetched already.*max_live_param"):
                engine.backward(model(torch.ones(2, 8)))

    on_two_ranks(work)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_that_some_ranks_do_not_use(use_reentrant):
    """They fetch what the others do, and give it back at the same places."""
    class Exits(Chain):
        def forward(self, x, leaves):
            x = self.part(x.requires_grad_(), 2, 0)
            other = self.part(self.part(x, 3, 2), 3, 5)
            return (x if leaves else other).square().mean()

    def work(rank):
        with small_gpt.RANDOM:
            torch.manual_seed(5)
            model = Exits(8, 1, use_reentrant)
        with small_gpt.prepare(model, thread_rank=rank, extra=[
                "zero_optimization.max_reuse_distance=0", f"zero_optimization.max_live_parameters={4 * 4096}"]) as e:
            for step in range(4):
                e.backward(model(torch.linspace(-1, 1, 16).view(2, 8), leaves=(step + e.rank) % 2))
                e.step()
                assert e.core.counters(last_step=True).fetches == 16

    on_two_ranks(work)


def test_gathered_bytes_are_the_formula():
    def work(rank):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU()) for _ in range(4)])
        with small_gpt.prepare(model, thread_rank=rank) as e:
            e.backward(model(torch.ones(2, 64)).sum())
            e.step()
            return e.core.counters(last_step=True)

    counters = on_two_ranks(work)[0]
    assert counters.gather_bytes == 2 * 4 * (64 * 64 * 4 // 2)  # twice each of four units, the other rank's half
    assert counters.gather_calls == 8


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_a_unit_stays_from_recompute_to_its_last_gradient_and_no_longer(checkpointing, frozen):
    model = small_gpt.make(checkpointing=checkpointing, layers=4)
    if frozen:
        for name, p in model.blocks.named_parameters():
            p.requires_grad_("norm1.weight" in name)
    with small_gpt.prepare(model) as engine:
        seen = {}
        for i, block in enumerate(model.blocks):  # the block's first op runs last in backward
            block.norm1.weight.register_post_accumulate_grad_hook(
                lambda p, i=i: seen.update({i: [n for n in held(engine) if n.startswith("blocks")]}))
        small_gpt.loop(model, engine, 1)
        assert seen == {i: [f"blocks.{i}"] for i in range(4)}
        assert held(engine) == []


def test_a_unit_is_given_back_when_its_forward_ends():
    model = small_gpt.make()
    with small_gpt.prepare(model) as engine:
        seen = []
        for block in model.blocks:  # hooks that are added after prepare's run after the release
            block.register_forward_hook(lambda *_: seen.append(held(engine)))
        model(*small_gpt.batch(0))
        assert seen == [[], [], []]


def test_slab_addresses_repeat():
    model = small_gpt.make()
    with small_gpt.prepare(model) as engine:
        places = []
        model.blocks[1].mlp.register_forward_hook(lambda *_: places.append(model.blocks[1].mlp[0].weight.data_ptr()))
        small_gpt.loop(model, engine, 5)
        assert len(places) == 5 and len(set(places)) == 1


# ---- several forwards ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_several_forwards_before_a_backward(checkpointing):
    a, b = small_gpt.batch(0), small_gpt.batch(1)
    plain = small_gpt.make()
    (plain(*a) + 2 * plain(*b)).backward()
    model = small_gpt.make(checkpointing=checkpointing)
    with small_gpt.prepare(model) as engine:
        engine.backward(model(*a) + 2 * model(*b))
        assert held(engine) == []
        for name, p in plain.named_parameters():
            torch.testing.assert_close(engine.grad(name), p.grad)
        engine.step()


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("stage", [1, 3])
def test_two_losses_backwarded_one_after_the_other(stage, checkpointing):
    a, b = small_gpt.batch(0), small_gpt.batch(1)
    plain = small_gpt.make()
    (plain(*a) + plain(*b)).backward()

    def work(rank):
        model = small_gpt.make(checkpointing=checkpointing)
        with small_gpt.prepare(model, stage, micro=2, thread_rank=rank) as engine:
            first, second = model(*a), model(*b)
            engine.backward(first)
            engine.backward(second)
            assert engine.core.counters().fetches == 2 * (2 * 7 - 2)
            return {name: engine.grad(name) for name, _ in model.named_parameters()}

    for name, grad in on_two_ranks(work)[0].items():
        torch.testing.assert_close(grad, plain.get_parameter(name).grad / 2)


def test_one_module_used_twice_in_one_backward():
    """Record 11: with recomputation the gradient may come twice in one backward; both count."""
    class Siamese(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.layers, self.reentrant = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]), reentrant

        def forward(self, x):
            y = 0
            for part in x.unbind(1):
                for layer in self.layers:
                    part = torch.tanh(layer(part) if self.reentrant is None else
                                      checkpoint(layer, part, use_reentrant=self.reentrant))
                y = y + part
            return y.square().mean()

    def gradients(reentrant, prepared):
        def work(rank):
            with small_gpt.RANDOM:
                torch.manual_seed(3)
                model = Siamese(reentrant)
            x = torch.linspace(-1, 1, 36).view(2, 3, 6).requires_grad_()
            if not prepared:
                model(x).backward()
                return {name: p.grad for name, p in model.named_parameters()}
            with small_gpt.prepare(model, 2, thread_rank=rank, extra=["zero_optimization.reduce_bucket_size=100"]) as e:
                e.backward(model(x))
                return {name: e.grad(name) for name, _ in model.named_parameters()}
        return on_two_ranks(work)[0] if prepared else work(None)

    expected = gradients(None, prepared=False)
    for reentrant in (None, True, False):
        found = gradients(reentrant, prepared=True)
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad)


@pytest.mark.parametrize("units", [None, ["Block", "Attention"]])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_retained_graph(checkpointing, frozen, units):
    def make():
        model = small_gpt.make(checkpointing=checkpointing)
        for name, p in model.blocks.named_parameters():
            p.requires_grad_(not frozen or "norm2" in name)
        return model

    plain = make()
    loss = plain(*small_gpt.batch(0))
    loss.backward()
    model = make()
    with small_gpt.prepare(model, micro=2, units=units) as engine:
        loss = model(*small_gpt.batch(0))
        engine.backward(loss, retain_graph=True)
        assert held(engine) == []
        engine.backward(loss)
        count = len(engine._weights.units)
        assert engine.core.counters().fetches == count + 2 * (count - 2)
        for name, p in plain.named_parameters():
            if p.requires_grad:
                torch.testing.assert_close(engine.grad(name), p.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_inside_a_modules_forward(use_reentrant):
    """No hook of the unit's module sees that its forward is computed again: its params say so when they are read."""
    class Inner(small_gpt.Block):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((small_gpt.WIDTH,), 1.5))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

        def inner(self, x):
            return super().forward(self.scale * x)

    plain = small_gpt.make(block=Inner)
    plain(*small_gpt.batch(0)).backward()

    def work(rank):
        model = small_gpt.make(block=Inner)
        with small_gpt.prepare(model, thread_rank=rank, extra=["zero_optimization.max_live_parameters=16384",
                                                               "zero_optimization.max_reuse_distance=0"]) as engine:
            engine.backward(model(*small_gpt.batch(0)))
            assert engine.core.counters().gather_calls == 2 * 7 - 2
            with pytest.raises(strata.FailedPrecondition, match='param "blocks.0.scale" of unit "blocks.0" is rel'):
                model.blocks[0].scale + 1
            return {name: engine.grad(name) for name, _ in model.named_parameters()}

    for name, grad in on_two_ranks(work)[0].items():
        torch.testing.assert_close(grad, plain.get_parameter(name).grad)


def test_frozen_weights_are_needed_after_the_last_gradient():
    """Parts of a unit under checkpoint, with a unit inside: the first gradient is the only one, the rest is frozen."""
    class Inner(nn.Linear):
        pass

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4), Inner(4, 4), nn.Linear(4, 4)])
            self.requires_grad_(False)
            self.parts[2].bias.requires_grad_()
            self.parts[1].bias.requires_grad_()

        def forward(self, x):
            for part in self.parts:
                x = torch.tanh(checkpoint(part, x, use_reentrant=False))
            return x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.outers = nn.Linear(4, 4), nn.ModuleList([Outer(), Outer()])

        def forward(self, x):
            x = self.first(x)
            for outer in self.outers:
                x = outer(x)
            return x.square().mean()

    with small_gpt.RANDOM:
        torch.manual_seed(4)
        plain = Model()
    model = copy.deepcopy(plain)
    plain(torch.ones(2, 4)).backward()
    with small_gpt.prepare(model, units=["Outer", "Inner"]) as engine:
        engine.backward(model(torch.ones(2, 4)))
        assert engine.core.counters().fetches == 2 * 5
        for name, param in plain.named_parameters():
            if param.requires_grad:
                torch.testing.assert_close(engine.grad(name), param.grad)


def test_evaluation_and_generation_between_micro_batches():
    def losses(evaluate):
        model = small_gpt.make()
        with small_gpt.prepare(model, micro=2) as engine:
            found = []
            for step in range(3):
                for part in range(2):
                    loss = model(*small_gpt.batch(step, 0, part))
                    if evaluate:
                        generate(model, engine)
                    engine.backward(loss)
                    found.append(loss.item())
                    if evaluate:
                        with torch.inference_mode():
                            model(*small_gpt.batch(7))
                engine.step()
                if evaluate:
                    model(*small_gpt.batch(8))  # recorded by autograd and dropped
            return found

    def generate(model, engine):
        ids = torch.zeros(1, 1, dtype=torch.long)
        with torch.no_grad():
            for _ in range(4):
                ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
        assert held(engine) == []

    assert losses(evaluate=True) == losses(evaluate=False)


# ---- saved tensors ---------------------------------------------------------------------------------------------------


def test_saved_weights_keep_no_memory():
    """Between forward and backward nothing reads the slabs: they can be given to other units."""
    model = small_gpt.make()
    with small_gpt.prepare(model) as engine:
        loss = model(*small_gpt.batch(0))
        assert held(engine) == [] and not any(e.is_read for u in engine._weights.units for e in u.entries)
        engine.backward(loss)


def test_saved_weights_of_a_recomputed_forward_keep_no_memory():
    model = small_gpt.make(checkpointing="reentrant")  # the other kind keeps what it recomputes itself
    with small_gpt.prepare(model) as engine:
        read = []
        for i, block in enumerate(model.blocks):
            block.register_forward_hook(lambda *_, i=i: engine._passes.in_backward and read.append(
                (i, [entry.name for entry in engine._weights.units[2 + i].entries if entry.is_read])) or None)
        engine.backward(model(*small_gpt.batch(0)))
        assert read == [(2, []), (1, []), (0, [])]


def test_views_of_weights_are_unpacked_as_they_were():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.linspace(-1, 1, 60).view(6, 10))

        def forward(self, x):
            a = x @ self.w.t()[2:5, 1:4]            # a strided piece at an offset
            b = a * self.w[1, 3:6] * self.w[::2, 7]  # rows and columns
            return (b * self.w.view(2, 3, 10)[1, :, 5].expand(2, 3)).sum() + self.w.pow(2).sum()

    x = torch.linspace(0, 1, 6).view(2, 3)
    plain = Odd()
    plain(x).backward()
    model = Odd()
    with small_gpt.prepare(model) as engine:
        engine.backward(model(x))
        torch.testing.assert_close(engine.grad(model.w), plain.w.grad)


def test_saved_by_other_hooks_inside_the_model():
    """save_on_cpu around a layer hides its saved weights from ours: the unit stays until the backward has read them."""
    class Layer(nn.Linear):
        def forward(self, x):
            with torch.autograd.graph.save_on_cpu():
                return torch.tanh(super().forward(x))

    def gradients(prepared):
        torch.manual_seed(2)
        model = nn.ModuleList([Layer(5, 5) for _ in range(3)])
        root = nn.Module()
        root.layers = model
        root.forward = lambda x: model[2](model[1](model[0](x))).sum()
        x = torch.linspace(-1, 1, 10).view(2, 5)
        if not prepared:
            root(x).backward()
            return [p.grad for p in root.parameters()]
        with small_gpt.prepare(root) as e:
            loss = root(x)
            assert held(e) == ["layers.1", "layers.2"]  # nothing asks for a gradient of x: layer 0 saved no weight
            e.backward(loss)
            assert held(e) == []
            return [e.grad(p) for p in root.parameters()]

    for plain, ours in zip(gradients(False), gradients(True)):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_param_that_was_replaced_is_named(compiled):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    if compiled:
        model[1].compile(backend="eager")
    with strata.torch.prepare(model, text=small_gpt.text()) as engine:
        old = model[1].weight
        model[1].weight = torch.nn.Parameter(torch.ones(2, 2))
        engine.backward(model(torch.ones(1, 2)).sum())
        with pytest.raises(strata.FailedPrecondition, match='param "1.weight" is another object'):
            engine.step()
        model[1].weight = old
        engine.step()
        del model[0].bias
        engine.skip_micro_batches()
        with pytest.raises(strata.FailedPrecondition, match='param "0.bias" is another object'):
            engine.step()


def test_a_tensor_saved_outside_the_hooks_raises():
    """Every release moves the param's version on: autograd itself refuses what was saved without our hooks."""
    model = small_gpt.make()
    with small_gpt.prepare(model) as engine:
        engine.backward(model(*small_gpt.batch(0)))
        with engine.gathered(model.head):
            y = (torch.ones(2, small_gpt.WIDTH, requires_grad=True) @ model.head.weight.t()).sum()
            assert not held(engine) == []
        with pytest.raises(strata.FailedPrecondition, match='shares the memory of param "head.weight" of unit "head"'):
            engine.step()
        param = model.head.weight
        with engine.gathered(model.head):
            z = (param * torch.ones(1, small_gpt.WIDTH, requires_grad=True)).sum()  # saves the param itself
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()
        del y


def test_an_alias_kept_after_the_forward():
    """Its memory stays valid while it lives, and a step that would change it under its reader is refused."""
    model = small_gpt.make()
    kept = []
    model.blocks[0].register_forward_hook(lambda *_: kept.append(model.blocks[0].norm1.weight.detach()))
    with small_gpt.prepare(model) as engine:
        engine.backward(model(*small_gpt.batch(0)))
        assert held(engine) == ["blocks.0"] and bool((kept[0] == 1).all())
        with pytest.raises(strata.FailedPrecondition,
                           match='shares the memory of param "blocks.0.norm1.weight" of unit "blocks.0"'):
            engine.step()
        kept.clear()
        engine.step()
        assert held(engine) == []


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_dropped_graphs_and_cycles(checkpointing):
    model = small_gpt.make(checkpointing=checkpointing)
    with small_gpt.prepare(model) as engine:
        for _ in range(3):
            loss = model(*small_gpt.batch(0))
            cycle = [loss]
            cycle.append(cycle)
            alive = weakref.ref(loss)
            del loss, cycle
        small_gpt.loop(model, engine, 2)
        gc.collect()
        assert alive() is None and held(engine) == []
        assert not any(unit.waiting or unit.recomputed for unit in engine._weights.units)
        assert engine._passes._recorded == []


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_is_refused_says_why():
    model = small_gpt.make()
    with small_gpt.prepare(model) as engine:
        loss = model(*small_gpt.batch(0))
        with pytest.raises(strata.FailedPrecondition, match=r"inside engine.backward\(loss\) only"):
            loss.backward()
        with pytest.raises(strata.FailedPrecondition, match='unit "tokens" is called outside the forward'):
            model.tokens(torch.zeros(1, dtype=torch.long))
        with torch.no_grad():
            model.tokens(torch.zeros(1, dtype=torch.long))
        with pytest.raises(strata.FailedPrecondition, match="saved-tensor hooks active"):
            with torch.autograd.graph.save_on_cpu():
                model(*small_gpt.batch(0))
        with pytest.raises(strata.FailedPrecondition, match="saved-tensor hooks active"):
            checkpoint(model, *small_gpt.batch(0), use_reentrant=False)
        with pytest.raises(strata.InvalidArgument, match="needs a loss with a gradient"):
            engine.backward(torch.ones(()))
        with pytest.raises(strata.InvalidArgument, match="needs a loss with a gradient"):
            with torch.no_grad():
                engine.backward(model(*small_gpt.batch(0)))
        with pytest.raises(strata.FailedPrecondition, match="0 of 1 micro-batches .*engine.skip_micro_batches"):
            engine.step()
        old = model(*small_gpt.batch(1))
        small_gpt.loop(model, engine, 1)
        with pytest.raises(strata.FailedPrecondition, match="has changed the weights since this forward"):
            engine.backward(old)


def test_parts_called_one_by_one():
    model, plain = small_gpt.make(), small_gpt.make()
    ids, _ = small_gpt.batch(0)
    plain.head(plain.tokens(ids)).square().mean().backward()
    with small_gpt.prepare(model) as engine:
        with engine.forward():
            y = model.head(model.tokens(ids))
        engine.backward(y.square().mean())
        for name in ("head.weight", "tokens.weight"):
            torch.testing.assert_close(engine.grad(name), plain.get_parameter(name).grad)


def test_an_error_in_the_forward_leaves_nothing_fetched():
    model = small_gpt.make()
    with small_gpt.prepare(model) as engine:
        hook = model.blocks[1].mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(*small_gpt.batch(0))
        hook.remove()
        assert held(engine) == [] and isinstance(model.blocks[1].norm1.weight, strata.torch.ReleasedParameter)
        small_gpt.loop(model, engine, 1)


def test_autocast_of_fp32_matrices_is_refused():
    model = small_gpt.make()
    with small_gpt.prepare(model) as engine:
        with pytest.raises(strata.FailedPrecondition,
                           match='unit "blocks.0" is called under torch.autocast with param "blocks.0.attention.qkv.'
                                 'weight" in float32.*defeats sharding.*bf16.enabled'):
            with torch.autocast("cpu", torch.bfloat16):
                model(*small_gpt.batch(0))
        assert held(engine) == []
    model = small_gpt.make()
    with small_gpt.prepare(model, bf16=True) as engine:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(*small_gpt.batch(0))
        engine.backward(loss)
        engine.step()


def test_autocast_to_another_16_bit_dtype_is_refused():
    model = small_gpt.make()
    with small_gpt.prepare(model, bf16=True) as engine:
        with pytest.raises(strata.FailedPrecondition, match='under torch.autocast with param "blocks.0.attention.qkv.'
                                                            'weight" in bfloat16: a float16 copy'):
            with torch.autocast("cpu", torch.float16):
                model(*small_gpt.batch(0))
        assert held(engine) == []


class CastingBlock(small_gpt.Block):
    """turn_on: autocast inside the forward; else it casts a weight itself."""

    turn_on = True

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.turn_on):
            y = super().forward(x)
        if not self.turn_on:
            y = torch.nn.functional.linear(y.bfloat16(), self.mlp[0].weight.bfloat16())[..., :small_gpt.WIDTH]
        return y.float()


@pytest.mark.parametrize("turn_on", [True, False])
@pytest.mark.parametrize("checkpointing", [None, "reentrant"])
def test_casts_of_weights_inside_a_forward_are_refused(turn_on, checkpointing):
    CastingBlock.turn_on = turn_on
    model = small_gpt.make(block=CastingBlock, checkpointing=checkpointing)
    with small_gpt.prepare(model) as engine:
        with pytest.raises(strata.FailedPrecondition,
                           match=r'unit "blocks.\d" turns torch.autocast on in its forward, or casts itself, with '
                                 r'param "blocks.\d.*weight" in float32: a bfloat16 copy of it .*defeats sharding'):
            engine.backward(model(*small_gpt.batch(0)))
        assert held(engine) == []


def test_casts_of_activations_and_vectors_are_kept():
    """16-bit tensors that a weight's unit saves: an embedding's output, and a norm's weight."""
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.norm = nn.Embedding(4, 4), nn.LayerNorm(4)

        def forward(self, ids):
            x = self.tokens(ids).bfloat16()
            return (x.square() * self.norm.weight.bfloat16()).float().sum()

    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    ids = torch.arange(4)
    plain(ids).backward()
    with small_gpt.prepare(model, units="Model") as engine:
        engine.backward(model(ids))
        for name in ("tokens.weight", "norm.weight"):
            assert torch.equal(engine.grad(name), plain.get_parameter(name).grad)


def test_sparse_gradients_are_refused_by_name():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True))
    with small_gpt.prepare(model) as engine:
        with pytest.raises(strata.InvalidArgument, match='gradient of param "0.weight": a torch.sparse_coo tensor'):
            engine.backward(model(torch.tensor([1])).sum())


@pytest.mark.parametrize("checkpointing, call", [(None, 1), ("reentrant", 1), ("reentrant", 2), ("nonreentrant", 2)])
def test_weights_written_in_a_forward_are_refused(checkpointing, call):
    """Also in one that is computed again; a view's write is the param's."""
    class Writes(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == call:
                with torch.no_grad():
                    self.weight.t()[0].mul_(2)
            return super().forward(x)

    model = small_gpt.make(block=lambda: Writes(small_gpt.WIDTH, small_gpt.WIDTH), checkpointing=checkpointing)
    with small_gpt.prepare(model) as engine:
        with pytest.raises(strata.FailedPrecondition, match=r'"blocks.(.).weight" of unit "blocks.\1" was written'):
            small_gpt.loop(model, engine, 1)
        with pytest.raises(strata.FailedPrecondition, match="was written"):
            small_gpt.loop(model, engine, 1)


def test_what_is_no_write_is_none():
    """Parametrizations, buffers that a forward writes, requires_grad_, gradients, several forwards and evaluation."""
    class Parametrized(nn.Module):
        def __init__(self):
            super().__init__()
            width = small_gpt.WIDTH
            self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))
            self.b = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))
            self.norm = nn.BatchNorm1d(small_gpt.LENGTH)

        def forward(self, x):
            self.a.parametrizations.weight.original.requires_grad_()
            return self.norm(self.b(self.a(x)) @ self.a.parametrizations.weight.original.t())

    model = small_gpt.make(block=Parametrized, layers=2)
    with small_gpt.prepare(model, micro=2) as engine:
        small_gpt.loop(model, engine, 2, micro=2)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), engine.gathered():
                model(*small_gpt.batch(0))
        small_gpt.loop(model, engine, 1, micro=2)


def test_weights_written_in_the_forward_are_refused_on_all_ranks():
    """Record 06a, with check_weights."""
    @torch.no_grad()
    def write(weight):
        weight.fill_(7)

    def work(rank):
        model = small_gpt.make()
        with small_gpt.prepare(model, thread_rank=rank, extra=["check_weights=true"]) as engine:
            hook = model.norm.register_forward_pre_hook(lambda module, _: write(module.weight))
            with pytest.raises(strata.FailedPrecondition, match='"norm.weight" of unit "norm" was written'):
                with torch.no_grad():
                    model(*small_gpt.batch(0))
            hook.remove()
            return engine.read("norm.weight")

    for values in on_two_ranks(work):
        assert bool((values == 1).all())


@pytest.mark.parametrize("stage", [0, 3])
def test_a_graph_through_the_models_of_two_engines_is_refused_by_its_reason(stage):
    makers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)]
    with small_gpt.prepare(makers[0], stage) as generator, small_gpt.prepare(makers[1], stage) as judge:
        judge.backward(makers[1](makers[0](torch.ones(2, 4)).detach()).square().mean())
        judge.step()
        with pytest.raises(strata.FailedPrecondition, match="is the backward of another engine.* as one module"):
            generator.backward(makers[1](makers[0](torch.ones(2, 4))).square().mean())
        generator.zero_grad()
        generator.backward(makers[0](torch.ones(2, 4)).square().mean())
        generator.step()


def test_an_epoch_that_ends_inside_a_step():
    model = small_gpt.make()
    with small_gpt.prepare(model, micro=2) as engine:
        engine.backward(model(*small_gpt.batch(0)))
        with pytest.raises(strata.FailedPrecondition, match="1 of 2 micro-batches.*engine.skip_micro_batches"):
            engine.step()
        engine.skip_micro_batches()
        engine.step()
        assert engine.core.info().applied_steps == 1
