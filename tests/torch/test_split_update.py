"""bench/peers/split_update.py as far as a CPU goes: what it compares and weighs, its modes, and why it is skipped."""
import json
import subprocess
import sys

import pytest
import torch

from conftest import BUILD, ROOT

sys.path += [str(ROOT / "bench" / "peers")]

import jobs  # noqa: E402
import split_update  # noqa: E402
import strata  # noqa: E402

CPU, STEPS = torch.device("cpu"), 3
NAMES = (split_update.BITS, split_update.BYTES)
ON_CPU = {jobs.O + "device": "cpu"}  # a device without memory of its own has nothing to pin


@pytest.mark.parametrize("micro_batches", split_update.MICRO_BATCHES)
def test_equal_runs_have_one_digest_and_others_another(micro_batches):
    wanted = split_update.digest({}, micro_batches, CPU, STEPS)
    for settings in (ON_CPU, {**ON_CPU, jobs.P + "device": "cpu"}, jobs.SPLIT_MASTER):
        assert split_update.digest(settings, micro_batches, CPU, STEPS) == wanted, settings
    for settings in ({"optimizer.params.lr": 2e-4}, {"optimizer.params.betas": [0.9, 0.96]}):
        assert split_update.digest(settings, micro_batches, CPU, STEPS) != wanted, settings
    assert split_update.digest({}, micro_batches, CPU, STEPS + 1) != wanted


def test_the_digest_is_of_the_state_too():
    """The loss of one step is the same, and with other betas so are the weights: bias corrections undo them."""
    wanted = split_update.digest({}, 1, CPU, 1)
    for settings in ({"optimizer.params.lr": 2e-4}, {"optimizer.params.betas": [0.9, 0.96]}):
        assert split_update.digest(settings, 1, CPU, 1) != wanted, settings


@pytest.mark.parametrize("mode", split_update.MODES)
def test_modes_are_settings_that_the_engine_knows(mode):
    """On the CPU they are refused for the one reason that it is one."""
    settings = {key: value for key, value in split_update.MODES[mode].items() if "pin_memory" not in key}
    if not {jobs.SPLIT, jobs.RATIO, jobs.BUDGET} & settings.keys():
        return split_update.system(settings, 1, CPU, ".").close()
    with pytest.raises(strata.FailedPrecondition, match="has no memory of its own"):
        split_update.system(settings, 1, CPU, ".")


def test_every_way_to_place_a_model_is_among_the_modes():
    given = [mode.keys() for mode in split_update.MODES.values()]
    for key in (jobs.SPLIT, jobs.SHARE, jobs.RATIO, jobs.BUDGET, jobs.LAYOUT, jobs.P + "device"):
        assert any(key in keys for keys in given), key
    assert any(jobs.SPLIT in keys and jobs.SHARE not in keys for keys in given)


def test_a_mode_that_differs_is_counted_and_named(monkeypatch):
    def digest(settings, micro_batches, device):
        return "other" if settings.get(jobs.SHARE) == 0.25 and micro_batches == 3 else "same"
    monkeypatch.setattr(split_update, "digest", digest)
    result = split_update.compare(CPU)
    assert result["target"] == 2 * len(split_update.MODES) and result["value"] == result["target"] - 1
    assert result["different"] == ["3 micro-batches, split update, share 0.25"]


@pytest.mark.parametrize("settings", [ON_CPU, {**ON_CPU, **jobs.SPLIT_MASTER}, {**ON_CPU, jobs.P + "device": "cpu"}])
def test_counted_bytes_are_those_of_the_formula(settings):
    assert split_update.ratio(settings, 1, CPU) == 1.0


def test_formula_of_what_is_kept_and_gathered():
    there = {**ON_CPU, jobs.P + "device": "cpu"}
    assert split_update.formula(ON_CPU, 1, 100) == 400
    assert split_update.formula({**ON_CPU, jobs.BUDGET: split_update.STATE // 2}, 1, 100) == 200
    assert split_update.formula(there, 1, 100) == 200 + 200 * 7 / 4   # the turn of a pass gathers nothing
    assert split_update.formula(there, 3, 100) == 600 + 200 * 19 / 4


def test_everything_that_is_weighed_is_another_placement():
    """And one that the engine knows: on the CPU they are refused for the one reason that it is one."""
    weighed = list(split_update.weighed())
    assert len({name for name, _, _ in weighed}) == len(weighed) == 34
    assert len({json.dumps([settings, micro], sort_keys=True) for _, settings, micro in weighed}) == len(weighed)
    for _, settings, micro in weighed:
        settings = {key: value for key, value in settings.items() if "pin_memory" not in key}
        with pytest.raises(strata.FailedPrecondition, match="has no memory of its own"):
            split_update.system(settings, micro, CPU, ".", split_update.matrices)


@pytest.mark.parametrize("wrong", [0.9, 1.25])
def test_the_worst_placement_is_the_value(monkeypatch, wrong):
    monkeypatch.setattr(split_update, "ratio", lambda settings, micro, device: wrong if settings[jobs.SHARE] == 0.5
                        and micro == 1 and jobs.P + "device" in settings else 1.01)
    result = split_update.weigh(CPU)
    assert result["value"] == wrong and len(result["ratios"]) == 34


def test_why_nothing_is_measured(tmp_path, monkeypatch):
    machine = {"versions": {"torch": "2"}, "gpus": 1}
    monkeypatch.setattr(split_update.runner, "LIBRARY", tmp_path / "libstrata.so")
    assert "device_cuda, optim_adamw_cuda not in" in split_update.obstacle(machine)
    (tmp_path / "plugins").mkdir()
    for name in ("device_cuda", "optim_adamw_cuda"):
        (tmp_path / "plugins" / f"{name}.so").touch()
    assert split_update.obstacle(machine) == ""
    assert split_update.obstacle({**machine, "gpus": 0}) == "torch sees no GPU"
    assert split_update.obstacle({**machine, "versions": {"torch": None}}).startswith("no torch in ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it is measured")
@pytest.mark.parametrize("name", NAMES)
def test_the_command_says_that_it_is_skipped(name):
    run = subprocess.run([ROOT / "bench" / "run", name], capture_output=True, text=True, timeout=120,
                         env={"PATH": "/usr/bin:/bin", "STRATA_BUILD_DIR": str(BUILD), "STRATA_PYTHON": sys.executable})
    last = json.loads(run.stdout.splitlines()[-1])
    assert run.returncode == 77 and last["name"] == name and last["value"] is None and last["skipped"]
    listed = subprocess.run([ROOT / "bench" / "run", "--list"], capture_output=True, text=True, timeout=20).stdout
    assert name in listed.split()
