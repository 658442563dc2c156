"""Settings that change while a model trains: what a param group says is what the next step does, in every host."""
import math
import subprocess
import sys

import pytest
import torch

import small_gpt
import strata
import strata.torch
from comparisons import gap
from conftest import ROOT
from strata import deepspeed

STEPS = 8


def settings(step):
    """Other ones in every step."""
    return {"lr": 0.002 + 0.001 * (step % 3), "betas": (0.95 - 0.05 * (step % 4), 0.9 + 0.02 * (step % 3)),
            "eps": 10.0**-(6 + step % 3), "weight_decay": 0.1 * (step % 5)}


def train(stage=1, change=settings, extra=()):
    model = small_gpt.make()
    with small_gpt.prepare(model, stage, extra) as engine:
        losses = []
        for step in range(STEPS):
            engine.param_groups[0].update(change(step))
            loss = model(*small_gpt.batch(step))
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
        return losses, engine.state_dict()


def test_a_load_brings_the_settings_of_the_run_that_saved(tmp_path):
    def two(load):
        torch.manual_seed(0)
        model = small_gpt.make()
        with small_gpt.prepare(model, 1) as engine:
            if load:
                engine.load(tmp_path, "t")
                assert engine.param_groups[0]["betas"] == (0.5, 0.6) and engine.param_groups[0]["eps"] is None
            else:
                engine.param_groups[0].update(lr=torch.tensor(0.05), betas=(0.5, 0.6))
            for number in range(2):
                engine.backward(model(*small_gpt.batch(number + 2 * load)))
                engine.step()
            if not load:
                engine.save(tmp_path, "t")
                for number in range(2, 4):
                    engine.backward(model(*small_gpt.batch(number)))
                    engine.step()
            return engine.state_dict()

    went_on, resumed = two(False), two(True)
    assert all(torch.equal(went_on[name], resumed[name]) for name in went_on)


def test_a_load_with_another_number_of_groups_says_so(tmp_path):
    model = torch.nn.Linear(4, 4)
    with strata.torch.prepare(model, text=small_gpt.text()) as engine:
        engine.param_groups[0]["lr"] = 0.5
        engine.save(tmp_path, "t")
    model = torch.nn.Linear(4, 4)
    with strata.torch.prepare(model, text=small_gpt.text(), groups=[{"params": [model.bias], "lr": 0.25}]) as engine:
        with pytest.warns(UserWarning, match="the checkpoint has 1 param_groups, 2 are here"):
            engine.load(tmp_path)
        assert engine.param_groups[0]["lr"] is None and engine.param_groups[1]["lr"] == 0.25


def train_plainly(change=settings):
    model = small_gpt.make()
    optimizer, losses = small_gpt.MasterAdamW(model), []
    for step in range(STEPS):
        given = change(step)
        optimizer.lr, optimizer.betas = given.get("lr", optimizer.lr), given.get("betas", optimizer.betas)
        optimizer.eps, optimizer.decay = given.get("eps", optimizer.eps), given.get("weight_decay", optimizer.decay)
        loss = model(*small_gpt.batch(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step(1)
    return losses


def test_every_setting_is_taken_at_the_step():
    plain = train_plainly()
    assert gap(train()[0], plain) < 2e-5
    for name in ("lr", "betas", "eps", "weight_decay"):
        def one(step):
            return {name: settings(step)[name]}

        assert gap(train(change=one)[0], train_plainly(one)) < 2e-5, name
        assert gap(train_plainly(one), train_plainly(lambda step: {})) > (1e-7 if name == "eps" else 1e-4), name


def test_placement_does_not_change_them():
    plain = train(0)
    for stage, extra in ((3, ()), (2, ["zero_optimization.offload_optimizer.device=cpu"])):
        other = train(stage, extra=extra)
        assert other[0] == plain[0] and all(torch.equal(other[1][name], value) for name, value in plain[1].items())


def test_what_a_group_says():
    model = small_gpt.make()
    no_decay = [p for name, p in model.named_parameters() if "norm" in name]
    given = {"params": no_decay, "betas": (0.8, 0.9), "weight_decay": 0.0}
    with small_gpt.prepare(model, groups=[given]) as engine:
        default, other = engine.param_groups
        assert dict(other) == {"lr": None, "betas": (0.8, 0.9), "eps": None, "weight_decay": 0.0}
        assert set(default.values()) == {None} and "betas" in repr(other)
        for change, why in ((lambda: default.update(learning_rate=1), "param_groups.0.: there is no setting "
                                                                       "'learning_rate'"),
                            (lambda: other.__setitem__("beta", 1), "param_groups.1.: .*did you mean betas"),
                            (lambda: default.update(lr=math.nan), "param_groups.0.: lr is NaN"),
                            (lambda: other.update(betas=(0.9, math.nan)), "beta2 is NaN"),
                            (lambda: other.update(eps=torch.tensor(math.nan)), "eps is NaN"),
                            (lambda: other.pop("lr"), "its settings stay")):
            with pytest.raises(ValueError, match=why):
                change()
        with pytest.raises(AttributeError):
            engine.param_groups.append({})
        engine.backward(model(*small_gpt.batch(0)))
        with pytest.raises(ValueError, match="lr is NaN"):
            engine.step(lr=math.nan)
        other["betas"] = (0.9, 2.0)
        with pytest.raises(ValueError, match="group 1"):
            engine.step()
        other["betas"] = None
        engine.step()
    with pytest.raises(ValueError, match=r"groups\[0\] has 'weight_deacy', did you mean weight_decay\?"):
        small_gpt.prepare(small_gpt.make(), groups=[{"params": [], "weight_deacy": 0.0}])


def test_a_refused_step_keeps_what_was_asked_of_it():
    model = small_gpt.make()
    with small_gpt.prepare(model, clip=0.0) as engine:
        engine.backward(model(*small_gpt.batch(0)))
        engine.clip_grad_norm_(1e-3)
        with pytest.raises(ValueError):
            engine.step(lr=-1.0)
        engine.step()
        assert engine.core.info().clip_factor < 0.1


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=STEPS + 1)


def test_a_scheduler_that_cycles_betas_with_the_calls_of_deepspeed():
    """Against torch's AdamW under the same scheduler."""
    model, losses = small_gpt.make(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = one_cycle(optimizer)
    for step in range(STEPS):
        loss = model(*small_gpt.batch(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": {"stage": 1},
              "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "weight_decay": 0.1}}}
    ours = []
    engine, wrapped, _, _ = deepspeed.initialize(model=small_gpt.make(), config=config, lr_scheduler=one_cycle,
                                                 overrides=['log_level="warn"'])
    assert wrapped.param_groups[0]["weight_decay"] == 0.1 and wrapped.param_groups[0]["eps"] == 1e-8
    for step in range(STEPS):
        loss = engine(*small_gpt.batch(step))
        engine.backward(loss)
        ours.append(loss.item())
        engine.step()
    assert gap(ours, losses) < 2e-5
    with pytest.raises(strata.FailedPrecondition, match="add_param_group"):
        wrapped.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    engine.close()


def test_the_calls_of_deepspeed_after_a_backward_that_raised():
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}

    def run(fails):
        engine, *_ = deepspeed.initialize(model=small_gpt.make(), config=config, overrides=['log_level="warn"'])
        if fails:
            engine.backward(engine(*small_gpt.batch(7)))
            engine.zero_grad()  # nothing
            loss = engine(*small_gpt.batch(8))
            handle = engine.module.tokens.weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.backward(loss)
            handle.remove()
            with pytest.raises(strata.FailedPrecondition, match=r"engine.step: .* call engine.drop_gradients\(\)"):
                engine.step()
            engine.zero_grad()
        for part in range(2):
            engine.backward(engine(*small_gpt.batch(part)))
            engine.step()
        assert engine.global_steps == 1
        found = engine.strata.state_dict()
        engine.close()
        return found

    clean, after = run(False), run(True)
    assert all(torch.equal(clean[name], value) for name, value in after.items())


# ---- torch's own optimizers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_of_torchs_own_is_refused(kind):
    model, other = small_gpt.make(), torch.nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1)
    with small_gpt.prepare(model) as engine:
        engine.backward(model(*small_gpt.batch(0)))
        optimizer.zero_grad()
        with pytest.raises(strata.FailedPrecondition, match=rf'{kind.__name__}.step: it holds param ".*" of unit ".*'
                                                            r"Call engine.step\(\)"):
            optimizer.step()
        unconcerned = kind(other.parameters(), lr=0.1)
        other(torch.ones(2)).sum().backward()
        before = other.weight.detach().clone()
        unconcerned.step()
        assert not torch.equal(before, other.weight)
        engine.step()


def test_an_older_torch_is_named():
    program = ("import torch; torch.__version__ = '2.3.1+cpu'\n"
               "try: import strata.torch\nexcept ImportError as e: print(e)")
    run = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(ROOT / "hosts" / "python")},
                         capture_output=True, text=True, timeout=100)
    assert run.stdout.startswith("strata.torch needs torch 2.4 or newer, found torch 2.3.1+cpu in /"), run.stderr


def test_groups_take_what_a_torch_optimizer_takes():
    model = small_gpt.make()
    named = [(name, p) for name, p in model.named_parameters() if "norm" in name]
    with small_gpt.prepare(model, groups=[{"params": named, "lr": 0.5},
                                          {"params": model.head.weight, "weight_decay": 0.0}]) as engine:
        assert [group["lr"] for group in engine.param_groups] == [None, 0.5, None]
    for wrong, what in ((("norms", named), 'groups.0. must be a dict with "params"'), ({"lr": 1}, '"params"'),
                        ({"params": ["norm"]}, "groups.0. has a str where a param belongs")):
        with pytest.raises(strata.InvalidArgument, match=what):
            small_gpt.prepare(small_gpt.make(), groups=[wrong])


@pytest.mark.parametrize("manifest", ["ds.json", {"train_batch_size": 4}])
def test_a_deepspeed_configuration_is_sent_on(manifest):
    with pytest.raises(strata.InvalidArgument, match="strata.deepspeed.initialize"):
        strata.torch.prepare(small_gpt.make(), manifest)
