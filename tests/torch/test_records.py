"""Cases that went wrong for people elsewhere, on this host. Numbers are the records' in the list of cases."""
import json
import math
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

import small_gpt
import strata
import strata.torch
from rank_processes import wait_until
from torch_ranks import BUILD, PROGRAM, on_gpus


def on_ranks(world, work):
    return strata.run_threads(world, work)


class Units(nn.Module):
    """Linear layers in a list; `forward` is given per test."""

    def __init__(self, forward, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._forward = forward

    def forward(self, *args):
        return self._forward(self.layers, *args)


def linear(rows, columns, seed):
    layer = nn.Linear(columns, rows, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 1, rows * columns).roll(seed).view(rows, columns) / math.sqrt(columns))
    return layer


# ---- 01: a unit that runs only for some inputs -----------------------------------------------------------------------


def arrays(engine):
    return {(name, array): engine.read(name, array) for name, _ in engine.model.named_parameters()
            for array in ("weight", "master", "exp_avg", "exp_avg_sq")}


def test_01_skipped_units():
    def forward(layers, x, second, third):
        x = torch.tanh(layers[0](x))
        if second:
            x = torch.tanh(layers[1](x))
        return (layers[2](x) if third else x).square().mean()

    def model():
        return Units(forward, linear(64, 64, 1), linear(64, 64, 5), linear(1, 64, 3))

    uses = [(second, True) for second in (True, True, False, True, False, False)] + [(True, False)]
    x = [torch.linspace(-1, 1, 128).view(2, 64) + 0.1 * rank for rank in range(2)]

    def work(rank):
        mine = model()
        with small_gpt.prepare(mine, thread_rank=rank) as engine:
            for second, third in uses:
                before = arrays(engine)
                engine.backward(mine(x[engine.rank], second, third))
                engine.step()
                assert not any(unit.fetched for unit in engine._weights.units)
                after = arrays(engine)
                for layer, used in (("1", second), ("2", third)):
                    for (name, array), value in after.items():
                        if f"layers.{layer}." in name:
                            assert torch.equal(value, before[name, array]) != used, (name, array)
            return engine.state_dict()

    plain = model()
    optimizers = [small_gpt.MasterAdamW(layer, clip=0) for layer in plain.layers]
    for second, third in uses:  # a skipped unit has its own step count and no decay
        for rank in range(2):
            plain(x[rank], second, third).backward()
        norm = math.sqrt(sum(float((p.grad / 2).double().square().sum()) for p in plain.parameters()
                             if p.grad is not None))
        for optimizer, used in zip(optimizers, (True, second, third)):
            if used:
                optimizer.step(2 / min(1, 1 / (norm + 1e-6)))
    for state in on_ranks(2, work):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=2e-6)


# ---- 03: experts used by some ranks only -----------------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.inner = linear(16, 16, seed)

    def forward(self, x):
        return torch.tanh(self.inner(x))


class Mixture(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.experts = nn.ModuleList([Expert(seed + i) for i in range(4)])

    def forward(self, x, chosen):
        return x + sum(self.experts[i](x) for i in chosen)


class MixtureModel(nn.Module):
    def __init__(self, checkpointing=False):
        super().__init__()
        self.first, self.last = linear(16, 8, 1), linear(1, 16, 3)
        self.mixtures = nn.ModuleList([Mixture(1), Mixture(7)])
        self.checkpointing = checkpointing

    def forward(self, x, chosen):
        x = self.first(x)
        for mixture, experts in zip(self.mixtures, chosen):
            x = (torch.utils.checkpoint.checkpoint(mixture, x, experts, use_reentrant=False) if self.checkpointing
                 else mixture(x, experts))
        return self.last(x).square().mean()


# Per step, per rank: the experts of the two mixtures.
CHOICES = [[([0, 1], [0, 1]), ([2, 3], [2, 3])], [([1], []), ([0], [0, 3])], [([], [2]), ([3], [])],
           [([], []), ([2], [1])], [([], []), ([], [])]]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("live", ["1e9", "4096"])
def test_03_experts_declared_as_one_unit(live, checkpointing):
    x = [torch.linspace(-1, 1, 16).view(2, 8) * (1 + rank) for rank in range(2)]

    def work(rank):
        model = MixtureModel(checkpointing)
        with small_gpt.prepare(model, thread_rank=rank, units=Mixture, clip=0.0,
                               extra=[f"zero_optimization.max_live_parameters={live}"]) as engine:
            grads = []
            for choice in CHOICES:
                engine.backward(model(x[engine.rank], choice[engine.rank]))
                grads.append({name: engine.grad(name) for name, _ in model.named_parameters()})
                engine.step()
            return grads, engine.state_dict()

    plain = MixtureModel()
    (grads, state), _ = on_ranks(2, work)
    optimizer = small_gpt.MasterAdamW(plain, clip=0)
    for choice, found in zip(CHOICES, grads):
        for rank in range(2):
            plain(x[rank], choice[rank]).backward()
        for name, p in plain.named_parameters():
            expected = torch.zeros_like(p) if p.grad is None else p.grad / 2
            torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)
        if choice != [([], []), ([], [])]:  # a mixture nobody used keeps its weights, plain AdamW would decay them
            optimizer.step(2)
        else:
            break
    assert all(bool(value.isfinite().all()) for value in state.values())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_03_a_graph_that_is_retained(checkpointing):
    """Its second backward fetches on every rank what the first one did, used there or not."""
    x = [torch.linspace(-1, 1, 16).view(2, 8) * (1 + rank) for rank in range(2)]

    def work(rank):
        model = MixtureModel(checkpointing)
        with small_gpt.prepare(model, thread_rank=rank, units=Mixture, micro=2, extra=["deadline_seconds=5"]) as engine:
            loss = model(x[engine.rank], CHOICES[1][engine.rank])
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            return {name: engine.grad(name) for name, _ in model.named_parameters()}, engine.core.counters().fetches

    plain = MixtureModel()
    for rank in range(2):
        plain(x[rank], CHOICES[1][rank]).backward()
    for grads, fetches in on_ranks(2, work):
        assert fetches == 4 + 2 * 4
        for name, p in plain.named_parameters():
            torch.testing.assert_close(grads[name], torch.zeros_like(p) if p.grad is None else p.grad / 2)


def test_03_experts_as_units_of_their_own_are_an_error_on_every_rank():
    def work(rank):
        model = MixtureModel()
        with small_gpt.prepare(model, thread_rank=rank, units=Expert, extra=["deadline_seconds=5"]) as engine:
            with pytest.raises(strata.StrataError) as error:
                for choice in CHOICES:
                    engine.backward(model(torch.ones(2, 8), choice[engine.rank]))
                    engine.step()
            return str(error.value)

    began = time.monotonic()
    for message in on_ranks(2, work):
        assert 'unit "mixtures.0.experts' in message and "rank" in message, message
    assert time.monotonic() - began < 60


# ---- 06: edits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [False, True])
def test_06_written_by_one_rank(bf16):
    def work(rank):
        model = Units(lambda layers, x: layers[0](x).sum(), linear(10, 1, 0))
        with small_gpt.prepare(model, thread_rank=rank, bf16=bf16) as engine:
            sign = 1 if engine.rank == 0 else -1
            engine.write("layers.0.weight", sign * torch.arange(1.0, 11).view(10, 1))
            with engine.gathered(model):
                assert model.layers[0].weight.flatten().tolist() == list(range(1, 11))
            engine.backward(model(torch.ones(1, 1, dtype=torch.bfloat16 if bf16 else torch.float32)))
            engine.step(lr=0.0)
            with pytest.raises(strata.InvalidArgument, match=r"shape \(10,\), the param has \(10, 1\)"):
                engine.write("layers.0.weight", torch.ones(10))
            return engine.read("layers.0.weight")

    for value in on_ranks(2, work):
        assert value.flatten().tolist() == list(range(1, 11))


@pytest.mark.parametrize("stage, threshold", [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1000)])
def test_06_written_while_gathered(stage, threshold, tmp_path):
    """(a) of the record: on both ranks, in a read-only window. Nothing but a load follows, which has the old values."""
    def work(rank):
        model = Units(lambda layers, x: layers[1](layers[0](x)).sum(), linear(10, 1, 0), linear(1, 10, 1))
        model.layers[1].requires_grad_(False)
        extra = [f"zero_optimization.param_persistence_threshold={threshold}"] if stage == 3 else []
        with small_gpt.prepare(model, stage, thread_rank=rank, extra=extra) as engine:
            def losses():
                found = []
                for _ in range(2):
                    found.append(model(torch.ones(2, 1)))
                    engine.backward(found[-1])
                    engine.step()
                return torch.stack(found).detach()

            losses()
            engine.save(tmp_path, "before")
            expected = losses()
            for layer, write in zip(model.layers, (lambda p: p.fill_(7), lambda p: p.view(-1)[3:].mul_(7))):
                match = r'gathered: param "layers.(.).weight" of unit "layers.\1" was written .* engine.write\(param'
                with pytest.raises(strata.FailedPrecondition, match=match):
                    with engine.gathered(), torch.no_grad():
                        write(layer.weight)
                for call in (losses, engine.state_dict, lambda: engine.save(tmp_path, "written"), engine.step,
                             lambda: engine.read(layer.weight), lambda: engine.write(layer.weight, torch.ones(10))):
                    with pytest.raises(strata.FailedPrecondition, match="was written"):
                        call()
                engine.load(tmp_path, "before")
                assert torch.equal(losses(), expected)

    on_ranks(2, work)


def test_06_written_by_one_rank_while_gathered():
    """The others hear of it where they wait for that rank."""
    def work(rank):
        model = Units(lambda layers, x: layers[0](x).sum(), linear(10, 1, 0))
        with small_gpt.prepare(model, thread_rank=rank) as engine:
            match = "was written" if engine.rank == 1 else "rank 1 closed"
            with pytest.raises((strata.FailedPrecondition, strata.errors.Unavailable), match=match):
                with engine.gathered(), torch.no_grad():
                    if engine.rank == 1:
                        model.layers[0].weight[3] = 7
                engine.backward(model(torch.ones(1, 1)))

    on_ranks(2, work)


@pytest.mark.parametrize("write", [lambda p: p.fill_(7), lambda p: p.numpy().fill(7)], ids=["torch", "numpy"])
@pytest.mark.parametrize("who, on", [((0, 1), "all 2 ranks"), ((0,), "rank 0"), ((1,), "rank 1")])
def test_06_written_while_gathered_with_check_weights(who, on, write):
    """Refused on all ranks, which hear who wrote what; the values are the old ones, and the run goes on."""
    match = rf'it failed on {on}: .*param "layers.0.weight" of unit "Units" was written between fetch and release'

    def work(rank):
        model = Units(lambda layers, x: layers[0](x).sum(), linear(10, 1, 0))
        with small_gpt.prepare(model, thread_rank=rank, extra=["check_weights=true"]) as engine:
            with pytest.raises(strata.FailedPrecondition, match=match):
                with engine.gathered(model), torch.no_grad():
                    if engine.rank in who:
                        write(model.layers[0].weight)
            with engine.gathered(model):
                values = model.layers[0].weight.clone()
            engine.backward(model(torch.ones(1, 1)))
            engine.step()
            return values

    for value in on_ranks(2, work):
        assert torch.equal(value, linear(10, 1, 0).weight)


# ---- 07 and 09: empty params and padding -----------------------------------------------------------------------------


class Sizes(nn.Module):
    def __init__(self, *shapes):
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(torch.linspace(0.5, 1.5, math.prod(shape)).view(shape)))

    def forward(self, x):
        return sum((p * p).sum() * x for p in self.parameters())


@pytest.mark.parametrize("shapes", [[(8,), (0,), (24,)], [(4, 4), (0, 4)], [(), (3, 0, 2)]], ids=str)
def test_07_zero_element_params(shapes, tmp_path):
    def work(rank, stage):
        model = Sizes(*shapes)
        with small_gpt.prepare(model, stage, thread_rank=rank) as engine:
            for _ in range(3):
                engine.backward(model(torch.tensor(0.5 + engine.rank)))
                engine.step()
            engine.save(tmp_path / str(stage), "one")
            state = engine.state_dict()
            engine.backward(model(torch.tensor(1.0)))
            engine.step()
            engine.load(tmp_path / str(stage))
            engine.core.export_weights(tmp_path / f"{stage}.safetensors")
            assert all(torch.equal(v, state[k]) for k, v in engine.state_dict().items())
            exported = shapes_in(tmp_path / f"{stage}.safetensors")
            assert all(exported[f"p{i}"] == list(shape) for i, shape in enumerate(shapes))
            return state

    def shapes_in(path):
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return {name: entry["shape"] for name, entry in header.items() if "shape" in entry}

    reference = on_ranks(2, lambda rank: work(rank, 0))[0]
    assert {tuple(v.shape) for v in reference.values()} == set(shapes)
    for stage in (1, 2, 3):
        for state in on_ranks(2, lambda rank: work(rank, stage)):
            assert all(torch.equal(v, reference[k]) for k, v in state.items())


def test_09_padding_stays_out():
    values = {}

    def work(rank):
        model = Sizes((5,), (7,), (3,))
        with small_gpt.prepare(model, thread_rank=rank, clip=0.1) as engine:
            with engine.gathered():
                values[engine.rank] = [p.detach().clone() for p in model.parameters()]
            engine.backward(model(torch.tensor(1.0)))
            norm = math.sqrt(sum(float(engine.grad(p).double().square().sum()) for p in model.parameters()))
            engine.step()
            assert engine.core.info().grad_norm == pytest.approx(norm, rel=1e-6)
            return engine.state_dict()

    states = on_ranks(4, work)
    for found in values.values():
        assert all(torch.equal(a, b) for a, b in zip(found, Sizes((5,), (7,), (3,)).parameters()))
    for state in states:
        assert all(bool(v.isfinite().all()) and torch.equal(v, states[0][k]) for k, v in state.items())


# ---- 12: small params stay whole -------------------------------------------------------------------------------------


def test_12_persistent_params_in_changing_orders():
    def work(rank):
        model = Units(lambda layers, x, order: sum(layers[i](x).sum() for i in order),
                      *(linear(size, 1, 0) for size in (15, 16, 17)))
        x = torch.ones(1, 1, requires_grad=True)  # so that backward needs the weights
        with small_gpt.prepare(model, thread_rank=rank, extra=["zero_optimization.param_persistence_threshold=16",
                                                               "zero_optimization.max_reuse_distance=0"]) as engine:
            gathers = []
            for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
                engine.backward(model(x, order))
                engine.step()
                gathers.append(engine.core.counters(last_step=True).gather_calls)
            return gathers, engine.state_dict()

    (gathers, state), (_, other) = on_ranks(2, work)
    # 17 elements: forward and backward; 15 and 16, together: once after each update.
    assert gathers == [2, 3, 3]
    assert all(torch.equal(value, other[name]) for name, value in state.items())


# ---- 18: what does not fit is refused before it is taken -------------------------------------------------------------


PINNED = ["zero_optimization.offload_optimizer.device=cpu", "zero_optimization.offload_optimizer.pin_memory=true"]


def test_18_more_than_the_budget_is_refused_before_it_is_taken():
    lines = []
    with pytest.raises(strata.ResourceExhausted,
                       match=r"needs .*\(\d+ bytes\) of host memory.*host_memory_limit allows .*\(300000 bytes\)"):
        strata.torch.prepare(small_gpt.make(), text=small_gpt.text(), log=lambda level, domain, text:
                             lines.append(text), overrides=[*PINNED, "host_memory_limit=300000", "log_level=info"])
    assert any(re.search(r"plan: cpu: in all .*\(\d+ bytes\)", line) for line in lines), lines


@pytest.mark.parametrize("budget", [None, 0, 8192])
def test_18_pinned_memory_or_a_stated_fallback(budget):
    """Memory that cannot or may not be locked is ordinary memory: said once, with the numbers and the same results."""
    lines, given = [], [] if budget is None else [f"plugin.offload_cpu.pinned_budget_bytes={budget}"]
    model = small_gpt.make()
    with strata.torch.prepare(model, text=small_gpt.text(), overrides=[*PINNED, *given],
                              log=lambda level, domain, text: lines.append(text)) as engine:
        losses = small_gpt.loop(model, engine, 5)
    (line,) = [line for line in lines if line.startswith("pin_memory: ")]
    why = "the device plugin cannot lock memory" if budget is None else f"the pinned budget is {budget} bytes, 0 used"
    assert re.search(rf'"reduced gradients" wants \d+ bytes, but {why}', line)
    assert losses == small_gpt.train(3, 5)[0]


# ---- 31 and 32: what is not finite -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_31_32_steps_that_are_not_finite_are_skipped_on_all_ranks(stage, value, bf16):
    def work(rank):
        lines = []
        model = small_gpt.make(layers=1)
        model.register_forward_hook(lambda module, args, loss: loss * factor[0])
        factor = [1.0]
        engine = strata.torch.prepare(
            model, text=small_gpt.text(stage, bf16=bf16), thread_rank=rank, log=lambda level, domain, text:
            lines.append(text), overrides=["log_level=info"])
        with engine:
            norms = []
            for step in range(5):
                factor[0] = value if step == 2 and engine.rank == 1 else 1.0
                before = engine.state_dict()
                engine.backward(model(*small_gpt.batch(step)))
                engine.step()
                info = engine.core.info()
                norms.append(info.grad_norm)
                unchanged = all(torch.equal(v, before[k]) for k, v in engine.state_dict().items())
                assert unchanged == (step == 2) and info.was_applied == (step != 2)
            return info, norms, [line for line in lines if "is skipped" in line]

    said = []
    for info, norms, lines in on_ranks(2, work):
        assert (info.steps, info.applied_steps, info.skipped_steps) == (5, 4, 1)
        assert not math.isfinite(norms[2]) and all(map(math.isfinite, norms[:2] + norms[3:]))
        said += lines
    (line,) = said
    assert re.search(r'step 3 is skipped: the reduced gradient of param "[\w.]+" is not finite on rank [01];', line)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_32_one_bad_element_of_one_rank_is_one_line(stage, bf16):
    """It names the param, and the rank whose part it is in, which is rank 0 whoever had it."""
    said, at = [], {}

    def spoil(gradient):
        if at.get(threading.get_ident()) == (1, 2):  # (rank, step)
            gradient = gradient.clone()
            gradient[5] = math.inf
        return gradient

    def work(rank):
        model = small_gpt.make(layers=1)
        with strata.torch.prepare(model, text=small_gpt.text(stage, bf16=bf16), thread_rank=rank,
                                  overrides=["log_level=info"],
                                  log=lambda level, domain, text: said.append(text)) as engine:
            model.blocks[0].norm1.weight.register_hook(spoil)
            applied = []
            for step in range(5):
                at[threading.get_ident()] = (engine.rank, step)
                engine.backward(model(*small_gpt.batch(step, engine.rank)))
                engine.step()
                applied.append(engine.core.info().was_applied)
            return applied, engine.core.info()

    for applied, info in on_ranks(2, work):
        assert applied == [1, 1, 0, 1, 1]
        assert (info.steps, info.applied_steps, info.skipped_steps) == (5, 4, 1)
    (line,) = [text for text in said if "skipped" in text]
    assert 'step 3 is skipped: the reduced gradient of param "blocks.0.norm1.weight" is not finite on rank 0;' in line


# ---- 59: which GPU ---------------------------------------------------------------------------------------------------

SHOW_GPU = """
import conftest, json, small_gpt, sys, torch
extra = small_gpt.on_cuda(world=int(sys.argv[1]))
with small_gpt.prepare(small_gpt.make(layers=1), extra=["deadline_seconds=60", *extra]) as engine:
    print(torch.cuda.get_device_properties(engine.device).uuid)
"""


def gpus_used(visible, world):
    """(what each rank printed, what it said on stderr)"""
    environment = dict(os.environ, STRATA_WORLD_SIZE=str(world), STRATA_JOB=f"torch-gpus-{os.getpid()}-{visible}")
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    ranks = [subprocess.Popen([sys.executable, "-c", SHOW_GPU, str(world)], cwd=pathlib.Path(__file__).parent,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              env=environment | {"STRATA_RANK": str(rank)}) for rank in range(world)]
    return [tuple(text.strip() for text in rank.communicate(timeout=180)) for rank in ranks]


def test_59_runs_on_the_cpu_need_no_variable(monkeypatch):
    for value in ("", "-1", "4,5"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        small_gpt.train(3, 1)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == value


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.skipif(not (BUILD / "lib" / "plugins" / "device_cuda.so").exists(), reason="device_cuda was not built")
def test_59_without_a_gpu_device_cuda_is_refused():
    with pytest.raises(strata.FailedPrecondition, match="device_cuda.*(no NVIDIA driver|no GPU is visible)"):
        small_gpt.prepare(small_gpt.make(), extra=["plugins.device=device_cuda"])


@on_gpus(1)
def test_59_a_model_on_a_gpu_under_a_manifest_of_host_memory_is_refused():
    model = small_gpt.make(layers=1).cuda()
    with pytest.raises(strata.InvalidArgument,
                       match=r'param "tokens.weight" is on cuda:0, and plugins.device = "device_host" trains in host '
                             r'memory: choose "device_cuda" .*, or leave the model on the CPU'):
        small_gpt.prepare(model)
    small_gpt.train(3, 1, model=model.cpu())  # it is as it was


@on_gpus(1)
def test_59_more_ranks_than_gpus_is_an_error_with_both_counts():
    first = str(torch.cuda.get_device_properties(0).uuid)
    for visible in ("0", f"GPU-{first}"):
        assert gpus_used(visible, 1)[0][0] == first
        _, (_, error) = gpus_used(visible, 2)
        assert f'local rank = 1, but 1 GPU is visible (CUDA_VISIBLE_DEVICES="{visible}")' in error, error
    (_, error), = gpus_used("", 1)
    assert 'no GPU is visible (CUDA_VISIBLE_DEVICES="")' in error, error


@on_gpus(2)
def test_59_rank_i_uses_the_ith_visible_gpu():
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(2)]
    for visible, expected in ((None, uuids), ("0,1", uuids), ("1,0", uuids[::-1]),
                              (f"GPU-{uuids[1]},GPU-{uuids[0]}", uuids[::-1])):
        assert [out for out, _ in gpus_used(visible, 2)] == expected, visible


# ---- 60: names and ports that are taken ------------------------------------------------------------------------------


def start_rank(folder, environment, **what):
    environment = {**os.environ, "STRATA_BUILD_DIR": str(BUILD), **environment}
    return subprocess.Popen([sys.executable, str(PROGRAM), str(folder), json.dumps(what)], env=environment, text=True,
                            stderr=subprocess.PIPE)


def losses_of(folder, ranks):
    for rank in ranks:
        _, errors = rank.communicate(timeout=180)
        assert rank.returncode == 0, errors
    return [torch.load(folder / f"rank{rank}")[0] for rank in range(len(ranks))]


def test_60_a_name_that_is_taken_and_a_restart_right_after_kill_9(tmp_path):
    name = f"torch-again-{os.getpid()}"
    places = [{"STRATA_RANK": str(rank), "STRATA_WORLD_SIZE": "2", "STRATA_JOB": name} for rank in range(2)]
    first = start_rank(tmp_path, places[0])  # waits for its rank 1
    wait_until(lambda: name in pathlib.Path("/proc/net/unix").read_text(), "rank 0 to be there")
    second = start_rank(tmp_path, places[0])
    _, error = second.communicate(timeout=60)
    assert second.returncode == 1, error
    assert f"a job of that name is running on this machine: process {first.pid} is its rank 0" in error, error
    first.kill()
    again = [start_rank(tmp_path, place, steps=2) for place in places]
    assert len(losses_of(tmp_path, again)[0]) == 2
    first.communicate()


def test_60_two_jobs_at_once_on_a_port_that_is_taken(tmp_path):
    """Ranks of one machine meet by the job's name: the launcher's port may be anybody's."""
    jobs = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for number in range(2):
            (tmp_path / str(number)).mkdir()
            job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1]), "WORLD_SIZE": "2",
                   "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": f"{os.getpid()}-{number}"}
            jobs.append([start_rank(tmp_path / str(number), {**job, "RANK": rank, "LOCAL_RANK": rank}, steps=3)
                         for rank in ("0", "1")])
        one, two = (losses_of(tmp_path / str(number), ranks) for number, ranks in enumerate(jobs))
    assert one == two and one[0] != one[1]


# ---- 64: a world that is not there -----------------------------------------------------------------------------------


def test_64_a_world_of_two_is_never_a_world_of_one():
    program = ("import conftest, small_gpt; "
               "small_gpt.prepare(small_gpt.make(), extra=['deadline_seconds=1'])")
    run = subprocess.run([sys.executable, "-c", program], cwd=pathlib.Path(__file__).parent, capture_output=True,
                         text=True, timeout=120, env=dict(os.environ, STRATA_RANK="0", STRATA_WORLD_SIZE="2",
                                                          STRATA_JOB=f"torch-alone-{os.getpid()}"))
    assert run.returncode != 0 and "rank 1" in run.stderr, run.stderr

    def work(rank):
        model = nn.Sequential(nn.Linear(1024, 1024, bias=False))
        with small_gpt.prepare(model, thread_rank=rank) as engine:
            return {item.what: item.bytes for item in engine.core.plan()}

    assert on_ranks(2, work)[0]["weight shards"] == 1024 * 1024 * 4 // 2
    assert on_ranks(1, work)[0]["whole weights"] == 1024 * 1024 * 4
