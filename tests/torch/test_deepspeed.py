"""strata.deepspeed: configurations, key by key, and a program written against DeepSpeed."""
import argparse
import collections
import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tomllib

import pytest
import torch

import small_gpt
import strata
from conftest import ROOT
from strata import deepspeed
from strata.deepspeed import alternatives, comm, config as reader, zero

# Rows 4 to 21 and 23, 24 of the requirements, in DeepSpeed's spelling.
CONFIG = {
    "train_batch_size": 16, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "steps_per_print": 50,
    "bf16": {"enabled": False}, "fp16": {"enabled": False, "loss_scale_window": 1000, "hysteresis": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "gradient_clipping": 1.0, "wall_clock_breakdown": False, "communication_data_type": "fp32",
    "zero_optimization": {
        "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 5e7, "stage3_param_persistence_threshold": 10, "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "sub_group_size": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "buffer_count": 4, "fast_init": True},
        "offload_param": {"device": "cpu", "pin_memory": True, "buffer_count": 5, "buffer_size": 1e8,
                          "max_in_cpu": 1e9},
        "round_robin_gradients": True, "allgather_partitions": True,
    },
}


def leaves(config):
    for value in config.values():
        yield from leaves(value) if isinstance(value, dict) else [value]


def changed(path, value):
    config = json.loads(json.dumps(CONFIG))
    *outer, last = path.split(".")
    part = config
    for name in outer:
        part = part.setdefault(name, {})
    part[last] = value
    return config


def status(config, path, **options):
    return {key.path: key for key in deepspeed.read(config, **options).keys}[path]


def test_every_key_is_reported():
    manifest = deepspeed.read(CONFIG)
    by_path = {key.path: key.status for key in manifest.keys}
    ineffective = {"fp16.enabled", "fp16.loss_scale_window", "fp16.hysteresis"} | {
        "zero_optimization." + name for name in (
            "offload_optimizer.buffer_count", "offload_optimizer.fast_init", "offload_param.buffer_count",
            "offload_param.buffer_size", "offload_param.max_in_cpu", "round_robin_gradients", "allgather_partitions")}
    assert {path for path, what in by_path.items() if what == "without effect"} == ineffective
    assert all(what == "honoured" for path, what in by_path.items() if path not in ineffective)
    assert len(by_path) == len(manifest.report()) == sum(1 for _ in leaves(CONFIG))
    line = "zero_optimization.offload_param.buffer_size = 100000000.0: without effect: device is cpu"
    assert line in manifest.report()


def test_a_relative_nvme_path_is_of_the_file_that_names_it(tmp_path, monkeypatch):
    """As in a manifest; a dict is of no file, and of the working directory."""
    directories = f"state, ../other/state,{tmp_path}/absolute"
    offload = {"device": "nvme", "nvme_path": directories}
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3, "offload_optimizer": offload,
                                                           "offload_param": offload}}
    file = tmp_path / "folder" / "ds.json"
    file.parent.mkdir()
    file.write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    expected = f"{tmp_path}/folder/state, {tmp_path}/folder/../other/state, {tmp_path}/absolute"
    for given in (file, "folder/ds.json", reader.load(file), reader.fill("folder/ds.json", {})[0]):
        if isinstance(given, dict):
            monkeypatch.chdir("/")  # where the file lies was known before
        manifest = deepspeed.read(given)
        for part in ("offload_optimizer", "offload_param"):
            path = f"zero_optimization.{part}.nvme_path"
            assert manifest.get(path) == expected
            assert f'{path} = "{directories}": honoured: relative to the file: {expected}' in manifest.report()
        monkeypatch.chdir(tmp_path)
    assert deepspeed.read(config).get("zero_optimization.offload_param.nvme_path") == directories
    assert reader.read(reader.loads(json.dumps(config))).get("zero_optimization.offload_param.nvme_path") == directories


@pytest.mark.parametrize("as_file", (True, False))
def test_state_lies_where_a_relative_nvme_path_says(as_file, tmp_path, monkeypatch):
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "state", "pin_memory": True}}}
    (tmp_path / "folder" / "state").mkdir(parents=True)
    (tmp_path / "state").mkdir()
    file = tmp_path / "folder" / "ds.json"
    file.write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(8, 8), config=str(file) if as_file else config)
    counts = [len(list(directory.iterdir())) for directory in (tmp_path / "folder" / "state", tmp_path / "state")]
    engine.close()
    assert counts == ([1, 0] if as_file else [0, 1])
    line = "pin_memory = true: without effect: beside nvme only a GPU needs it, and params are on the CPU"
    assert f"zero_optimization.offload_optimizer.{line}" in engine.report  # as the engine's log says


def test_pin_memory_beside_nvme_is_for_a_gpu():
    part = "zero_optimization.offload_optimizer"
    offload = {"device": "nvme", "nvme_path": "/a", "pin_memory": True}
    config = {"train_batch_size": 1, "zero_optimization": {"offload_optimizer": offload}}
    found = deepspeed.read(config)
    honoured = f"{part}.pin_memory = true: honoured: beside a GPU; on the CPU without effect"
    assert honoured in found.report() and honoured in found.report("cuda")
    assert f"{part}.pin_memory = true: without effect" in "\n".join(found.report("cpu"))
    offload["device"] = "cpu"
    assert f"{part}.pin_memory = true: honoured" in deepspeed.read(config).report("cpu")
    offload.update(device="nvme", pin_memory=False)
    assert f"{part}.pin_memory = false: honoured" in deepspeed.read(config).report("cpu")


@pytest.mark.parametrize("path,value,why", [
    ("fp16.enabled", True, "set fp16.enabled to false and bf16.enabled to true"),
    ("optimizer.type", "OneBitAdam", '"AdamW" and "Adam"'),
    ("zero_optimization.stage_3", 1, "no known key, did you mean zero_optimization.stage"),
    ("zero_pp.quant_bits", 4, "quantized communication"),
    ("zero_optimization.zero_quantized_weights", True, "quantized"),
    ("zero_optimization.zero_hpz_partition_size", 8, "secondary partitions"),
    ("prescale_gradients", True, "divided once"), ("scheduler.type", "WarmupLR", "scheduler of torch"),
    ("nebula.enabled", True, "no known key"),
    ("zero_optimization.cpu_offload", False, "contradicts another key"),
    ("activation_checkpointing.cpu_checkpointing", True, "moving activations"),
    ("optimizer.params.lr", "auto", '"auto" has no value here'),
])
def test_what_cannot_be_had_is_refused_by_path(path, value, why):
    with pytest.raises(deepspeed.Refused) as error:
        deepspeed.read(changed(path, value))
    assert [key.path for key in error.value.keys] == [path] and why in str(error.value) and path in str(error.value)


def test_all_refusals_come_at_once():
    with pytest.raises(deepspeed.Refused) as error:
        deepspeed.read({"fp16": {"enabled": True}, "trian_batch_size": 4, "scheduler": {"type": "WarmupLR"}})
    assert [key.path for key in error.value.keys] == ["fp16.enabled", "trian_batch_size", "scheduler.type"]


def test_aliases_defaults_and_auto(tmp_path):
    assert status({"zero_optimization": {"stage": 3, "max_live_parameters": 5}},
                  "zero_optimization.max_live_parameters").status == "honoured"
    assert status({"zero_optimization": {"cpu_offload": True}}, "zero_optimization.cpu_offload").status == "mapped"
    assert status({}, "gradient_clipping").value == 1.0
    low = deepspeed.read({"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 5}})
    assert [key.note for key in low.keys if "live" in key.path] == ["only at stage 3"]
    manifest = deepspeed.read({"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {
        "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto"}}, {"train_micro_batch_size_per_gpu": 3}, hidden_size=100)
    assert [manifest.get(k) for k in ("train_micro_batch_size_per_gpu", "zero_optimization.reduce_bucket_size",
                                      "zero_optimization.prefetch_bucket_size",
                                      "zero_optimization.param_persistence_threshold")] == [3, 10000, 9000, 1000]


def test_the_ratio_of_the_optimizer_on_the_cpu_is_honoured():
    path = "zero_optimization.offload_optimizer.ratio"
    for ratio in (0.5, 1.0):
        assert status(changed(path, ratio), path) == (path, ratio, "honoured", "")
        assert deepspeed.read(changed(path, ratio)).get(path) == ratio
    idle = status({"zero_optimization": {"stage": 3, "offload_optimizer": {"ratio": 0.5}}}, path)
    assert (idle.status, idle.note) == ("without effect", "device is none")
    for ratio, why in ((1.5, f"`{path}` must be at most 1"), (0.5, "has no memory of its own")):
        config = {"train_batch_size": 4, "zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": ratio}}}
        with pytest.raises(strata.StrataError, match=why):  # of the engine, on the CPU
            deepspeed.initialize(model=small_gpt.make(), config=config)


@pytest.mark.parametrize("text,why", [
    ('{"bf16": {"enabled": true,}}', ":1:27: no JSON: "), ('{"bf16": {}\n', ":2:1: no JSON: "),
    ('{"bf16": {"enabled": true}, "bf16": {"enabled": false}}', ": bf16 is there twice"),
    ('{"zero_optimization": {"stage": 1, "stage": 2}}', ": zero_optimization.stage is there twice"),
    ("[1]", r": all of it = \[1\]: an object"), ('{"bf16": true}', ": bf16 = true: an object of settings"),
    ('{"optimizer": {"params": 3}}', ": optimizer.params = 3: an object"),
    ('{"zero_optimization": {"stag": 2}}', ": zero_optimization.stag = 2: no known key, did you mean zero_optimiza"),
])
def test_errors_name_the_file_and_the_key(tmp_path, text, why):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(strata.InvalidArgument, match=f"^DeepSpeed configuration {path}{why}"):
        deepspeed.read(path)


@pytest.mark.parametrize("zero,why", [
    ({"stage": 5}, "`zero_optimization.stage` must be at most 3, got 5"),
    ({"stage": "three"}, "`zero_optimization.stage` must be a whole number"),
    ({"stage": 3, "stage3_max_live_parameters": -1}, "`zero_optimization.stage3_max_live_parameters` must be"),
])
def test_errors_of_the_engine_name_them_too(tmp_path, zero, why):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}))
    with pytest.raises(strata.InvalidArgument, match=f"^DeepSpeed configuration {path}: {why}"):
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config=path)


def test_a_program_written_against_deepspeed(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    losses = strata.run_threads(2, lambda rank: small_gpt.train(3, 4, micro=2, thread_rank=rank))

    def work(rank):
        model = small_gpt.make()
        engine, optimizer, _, scheduler = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=tmp_path / "ds.json", thread_rank=rank,
            lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0 if step < 4 else 0.0))
        found = []
        for step in range(4):
            for part in range(2):
                loss = engine(*small_gpt.batch(step, rank.rank, part))
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
        assert engine.global_steps == 4 and engine.train_batch_size() == 16 and engine.zero_optimization_stage() == 3
        assert engine.was_step_applied() and engine.get_global_grad_norm() > 0 and engine.get_lr() == [0.0]
        for epoch in (2, 3):  # the second replaces the first: it has the same tag
            engine.save_checkpoint(tmp_path, client_state={"epoch": epoch})
        before = engine.strata.state_dict()
        for part in range(2):
            engine.backward(engine(*small_gpt.batch(5, rank.rank, part)))
            engine.step()
        assert all(torch.equal(value, before[name]) for name, value in engine.strata.state_dict().items())  # lr 0
        assert engine.load_checkpoint(tmp_path) == (f"{tmp_path}/global_step4", {"epoch": 3})
        assert engine.global_steps == 4 and engine.global_samples == 64 and scheduler.last_epoch == 4
        engine.save_16bit_model(tmp_path / "new" / "folder")  # made, as save_checkpoint makes its own
        with pytest.raises(strata.AlreadyExists if rank.rank == 0 else strata.Aborted):
            engine.save_16bit_model(tmp_path / "new" / "folder")
        engine.close()
        return found

    assert strata.run_threads(2, work) == [run[0] for run in losses]


def test_the_advice_about_fp16_is_good():
    with pytest.raises(deepspeed.Refused, match="set fp16.enabled to false and bf16.enabled to true"):
        deepspeed.read(changed("fp16.enabled", True))
    manifest = deepspeed.read({**CONFIG, "fp16": {"enabled": False}, "bf16": {"enabled": True}})
    assert manifest.get("bf16.enabled") is True


def test_initialize_refuses_what_it_would_ignore():
    model = small_gpt.make()
    sgd = torch.optim.SGD(model.parameters(), lr=1)
    for options, why in (({"optimizer": sgd}, "the optimizer is the configuration's"),
                         ({"training_data": [1]}, "no data loader"), ({"config": None}, "needs config")):
        with pytest.raises(strata.InvalidArgument, match=why):
            deepspeed.initialize(model=model, **{"config": CONFIG, **options})


def flat(table, prefix=""):
    """{path: value} of a TOML or JSON table, under the manifest's names."""
    found = {}
    for name, value in table.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return {path.replace("stage3_", ""): value for path, value in found.items()}


@pytest.mark.parametrize("name", ["no_offload", "cpu", "nvme"])
def test_the_examples_say_what_their_toml_counterparts_say(name):
    """Where a JSON file has "auto", as users of a Trainer do, the TOML file's value is given as the argument."""
    folder = ROOT / "examples" / "manifests"
    wanted = flat(tomllib.loads((folder / f"zero3_{name}.toml").read_text()))
    given = json.loads((folder / f"ds_zero3_{name}.json").read_text())
    wanted["train_batch_size"] = 4
    autos = {path: wanted[path.replace("stage3_", "")]
             for path, value in reader._leaves(given, "") if value == "auto"}
    assert len(autos) == 12
    manifest = deepspeed.read(given, autos)
    found = flat(tomllib.loads(manifest.text))
    assert found.pop("no_effect_keys") == "warn" and found == wanted
    with pytest.raises(deepspeed.Refused) as error:
        deepspeed.read(given)
    assert sorted(key.path for key in error.value.keys) == sorted(autos)
    if name == "nvme":
        if not list(folder.parents[1].glob("plugins/offload_nvme/*")):
            with pytest.raises(strata.NotFound, match="plugin offload_nvme was not found"):
                strata.Engine(text=manifest.text)
        return
    with strata.Engine(text=manifest.text, overrides=["log_level=\"warn\""]) as ours, strata.Engine(
            folder / f"zero3_{name}.toml", overrides=["log_level=\"warn\""]) as theirs:
        assert all(ours.setting(path) == theirs.setting(path) for path in wanted)


def test_programs_with_arguments_of_their_own():
    arguments = {"gradient_clipping": (0.5, "--clip"), "train_batch_size": (8, "--batch"),
                 "optimizer.params.lr": (1e-4, "--lr")}
    config, auto = reader.fill({"optimizer": {"params": {"lr": "auto"}}}, arguments, ["train_batch_size"])
    assert config == {"gradient_clipping": "auto", "optimizer": {"params": {"lr": "auto"}}}
    assert auto == {"gradient_clipping": 0.5, "train_batch_size": 8, "optimizer.params.lr": 1e-4}
    for changes in ({"gradient_clipping": 1.0}, {"train_batch_size": 4}, {"optimizer": {"params": {"lr": 1.0}}}):
        with pytest.raises(deepspeed.Refused, match="; \"auto\" takes it from there"):
            reader.fill(changes, arguments, ["train_batch_size"])
    with pytest.raises(deepspeed.Refused) as error:  # what read would refuse comes with it, once
        reader.fill({"gradient_clipping": 1.0,
                     "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
                     "fp16": {"enabled": True}, "steps_per_print": "auto"},
                    {**arguments, "fp16.enabled": (False, "--fp16")})
    assert [key.path for key in error.value.keys] == ["gradient_clipping", "fp16.enabled", "scheduler.type",
                                                      "scheduler.params.warmup_num_steps"]
    assert str(error.value).count("use a scheduler of torch") == 1 and "set fp16.enabled to false" in str(error.value)
    with pytest.raises(deepspeed.Refused, match="scheduler of torch.*constant_with_warmup"):
        deepspeed.read({"scheduler": {"params": {"warmup_max_lr": "auto"}}})


@pytest.mark.parametrize("sizes,largest", [({"hidden_size": 8}, 8), ({"hidden_sizes": [4, 16, 8]}, 16),
                                           ({"text_config": {"hidden_size": 32}}, 32), ({}, None)])
def test_hidden_sizes(sizes, largest):
    def named(values):
        return type("Config", (), {k: named(v) if isinstance(v, dict) else v for k, v in values.items()})

    assert reader.hidden_size(named({"config": named(sizes)})) == largest and reader.hidden_size(object()) is None


# ---- what the engine's calls answer ----

PLAIN = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "steps_per_print": 0}
CLIENT_STATE = {"epoch": 3, "best": 0.1 + 0.2, "tiny": 5e-324, "large": 2**70, "name": "\u00e9\n\0\"", "": None,
                "on": True,
                "lists": [1, 1.0, [], [None, {"a": {}}]], "infinite": float("inf")}


def started(world=1, rank=None, config=PLAIN, **options):
    """An engine of a small model, after one step."""
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config, log=lambda *_: None,
                                      thread_rank=rank, **options)
    stepped(engine)
    return engine


def stepped(engine):
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.ones(1, 4)).square().mean())
        engine.step()


def exactly(value):
    """A value with the types in it, which == does not compare."""
    if isinstance(value, dict):
        return {(type(key), key): exactly(inner) for key, inner in value.items()}
    return [exactly(inner) for inner in value] if isinstance(value, list) else (type(value), value)


def test_client_state_comes_back_at_another_world_size_and_in_a_fresh_process(tmp_path):
    def work(rank):
        with contextlib.closing(started(rank=rank)) as engine:
            engine.save_checkpoint(tmp_path, "first", client_state=CLIENT_STATE)
            stepped(engine)
            engine.save_checkpoint(tmp_path, 2)  # tags are texts, and the state of the save before is not its own
            assert engine.load_checkpoint(tmp_path, "first") == (f"{tmp_path}/first", CLIENT_STATE)
            assert engine.global_steps == 1 and engine.global_samples == 2
            return engine.load_checkpoint(tmp_path)

    assert strata.run_threads(2, work) == [(f"{tmp_path}/2", {})] * 2
    with contextlib.closing(started()) as engine:
        path, state = engine.load_checkpoint(str(tmp_path), "first")
        assert path == f"{tmp_path}/first" and exactly(state) == exactly(CLIENT_STATE)
        assert engine.load_checkpoint(tmp_path, 2) == (f"{tmp_path}/2", {}) and engine.global_samples == 4
    program = ("import json, sys, torch, strata.deepspeed as deepspeed\n"
               "engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=json.loads(sys.argv[1]))\n"
               "print(json.dumps(engine.load_checkpoint(sys.argv[2], 'first')))\n")
    assert exactly(json.loads(run(program, json.dumps(PLAIN), str(tmp_path)))[1]) == exactly(CLIENT_STATE)


def run(program, *arguments, **environment):
    """What a program of its own process prints."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "hosts" / "python"), OMP_NUM_THREADS="1", **environment)
    ended = subprocess.run([sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True,
                           timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_client_state_that_would_not_come_back_equal_is_refused_by_name(tmp_path):
    with contextlib.closing(started()) as engine:
        for state, why in ((("a",), "client_state is a tuple, a dict is needed"),
                           ({"a": [0, (1, 2)]}, r"client_state\['a'\]\[1\] is a tuple.*use a list"),
                           ({"loss": torch.ones(1)}, r"client_state\['loss'\] is a Tensor.*tolist\(\) or .item"),
                           ({"a": {1: 2}}, r"client_state\['a'\] has the key 1, a int: .*use '1'"),
                           ({"args": argparse.Namespace()}, r"client_state\['args'\] is a Namespace.*vars\(args\)"),
                           ({"n": collections.Counter()}, r"is a Counter.*use dict\(value\)"),
                           ({"o": object()}, r"is a object.*a file of your own beside the checkpoint"),
                           ({"b": b""}, "is a bytes")):
            with pytest.raises(strata.InvalidArgument, match=why):
                engine.save_checkpoint(tmp_path, client_state=state)
    assert list(tmp_path.iterdir()) == []


def test_the_scheduler_and_the_settings_it_made_come_back(tmp_path):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])

    with contextlib.closing(started(lr_scheduler=schedule)) as engine:
        engine.save_checkpoint(tmp_path, "scheduled")
        rates = engine.get_lr()
    assert rates == pytest.approx([0.01])
    with contextlib.closing(started()) as engine:
        engine.load_checkpoint(tmp_path)  # its scheduler is of no use here
        assert engine.get_lr() == [0.1]
        engine.save_checkpoint(tmp_path, "not_scheduled")
    with contextlib.closing(started(lr_scheduler=schedule)) as engine:
        for count in (2, 3):
            stepped(engine)
            assert engine.lr_scheduler.last_epoch == count
        for tag, options in (("scheduled", {"load_lr_scheduler_states": False}), ("not_scheduled", {})):
            engine.load_checkpoint(tmp_path, tag, **options)
            assert engine.lr_scheduler.last_epoch == 3 and engine.get_lr() == pytest.approx([0.001])
        engine.load_checkpoint(tmp_path, "scheduled")
        assert engine.lr_scheduler.last_epoch == 1 and engine.get_lr() == rates
        engine.lr_scheduler.extra = object()
        with pytest.raises(strata.InvalidArgument, match="lr_scheduler MultiStepLR has more than plain values"):
            engine.save_checkpoint(tmp_path, "not_plain")


def test_a_load_where_nothing_is_warns_and_one_of_a_half_checkpoint_is_an_error(tmp_path, caplog):
    (tmp_path / "logs" / "run").mkdir(parents=True)
    (tmp_path / "logs" / "data.h5").touch()

    def work(rank):
        with contextlib.closing(started(rank=rank)) as engine:
            found = [engine.load_checkpoint(root) for root in (tmp_path / "none", tmp_path)]
            with pytest.raises(strata.NotFound, match="no such checkpoint"):
                engine.load_checkpoint(tmp_path, "named")
            stepped(engine)  # goes on
            assert engine.global_steps == 2
            engine.save_checkpoint(tmp_path / "whole", "a")
            return found

    with caplog.at_level(logging.WARNING, logger="strata.deepspeed"):
        assert strata.run_threads(2, work) == [[(None, {})] * 2] * 2
    assert [record.message.count("training begins anew") for record in caplog.records] == [1, 1]  # of rank 0

    def without(*names):
        shutil.rmtree(tmp_path / "half", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "half")
        for name in names:
            path = tmp_path / "half" / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    with contextlib.closing(started()) as engine:
        for names in (["a"], ["latest"], ["a/index.h5"], ["a/rank00001.h5"], ["latest", "a/index.h5"]):
            without(*names)
            with pytest.raises(strata.StrataError):
                engine.load_checkpoint(tmp_path / "half")
        without("latest")
        (tmp_path / "half" / "a").rename(tmp_path / "half" / ".a.partial")  # a first save that was killed
        with pytest.raises(strata.StrataError):
            engine.load_checkpoint(tmp_path / "half")


def test_arguments_of_saves_and_loads_that_cannot_be_honoured_are_refused(tmp_path):
    with contextlib.closing(started()) as engine:
        for call, options in ((engine.save_checkpoint, {"save_latest": False}),
                              (engine.save_checkpoint, {"exclude_frozen_parameters": True}),
                              (engine.load_checkpoint, {"load_optimizer_states": False}),
                              (engine.load_checkpoint, {"load_module_only": True}),
                              (engine.load_checkpoint, {"load_module_strict": False}),
                              (engine.load_checkpoint, {"custom_load_fn": print}),
                              (engine.save_16bit_model, {"exclude_frozen_parameters": True})):
            with pytest.raises(strata.InvalidArgument, match=f"{call.__name__}.{next(iter(options))}="):
                call(tmp_path, **options)
        engine.save_checkpoint(tmp_path, save_latest=True)
        path, _ = engine.load_checkpoint(tmp_path, load_optimizer_states=True, load_module_only=False)
        assert path == f"{tmp_path}/global_step1"
        saved = engine.strata.state_dict()
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=PLAIN, weights=saved)  # as the advice is
    with contextlib.closing(engine):
        assert all(torch.equal(value, saved[name]) for name, value in engine.strata.state_dict().items())


def test_what_programs_ask_the_engine():
    config = {**PLAIN, "train_batch_size": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
              "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}

    def work(rank):
        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config_params=config, log=lambda *_: None,
                                          thread_rank=rank, dist_init_required=True)
        with contextlib.closing(engine):
            assert engine.device == torch.device("cpu") and engine.config == config
            assert (engine.global_rank, engine.local_rank, engine.world_size) == (rank.rank, rank.rank, 2)
            assert engine.zero_optimization() and engine.zero_optimization_stage() == 2
            assert engine.bfloat16_enabled() and not engine.fp16_enabled() and engine.gradient_clipping() == 0.5
            assert engine.train_micro_batch_size_per_gpu() == 1 and engine.gradient_accumulation_steps() == 2
            for step in range(2):
                assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (step, 4 * step, 2 * step)
                for _ in range(2):
                    engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).square().mean())
                    engine.step()
            assert engine.skipped_steps == 0 and engine.in_features == 4  # the model's own

    strata.run_threads(2, work)
    with contextlib.closing(started()) as engine:
        assert not engine.zero_optimization() and not engine.bfloat16_enabled() and engine.local_rank == 0


@pytest.mark.parametrize("owner,name,why", [
    (deepspeed, "DeepSpeedConfig", r"strata.deepspeed has no DeepSpeedConfig: read\(config\)"),
    (deepspeed, "ops", 'optimizer.type is "AdamW"'), (deepspeed, "no_such", "^strata.deepspeed has no no_such$"),
    (zero, "TiledLinear", "strata.deepspeed.zero has no TiledLinear: unit_size"),
    (comm, "all_reduce", "strata.deepspeed.comm has no all_reduce: after init_distributed, torch.distributed"),
])
def test_what_is_not_there_says_how_else(owner, name, why):
    with pytest.raises(AttributeError, match=why):
        getattr(owner, name)
    assert not hasattr(owner, "__no_such__")


def test_what_the_engine_has_not_says_how_else():
    with contextlib.closing(started()) as engine:
        with pytest.raises(AttributeError, match="the engine has no eval_batch: engine.batch. under torch.no_grad"):
            engine.eval_batch
        with pytest.raises(AttributeError, match="the engine has no no_such$"):
            engine.no_such
        assert [name for name in alternatives.OF_ENGINE if hasattr(engine, name)] == []
    for owner, names in ((deepspeed, alternatives.OF_MODULE), (zero, alternatives.OF_ZERO)):
        assert [name for name in names if hasattr(owner, name)] == []


def test_arguments_of_the_command_line(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(PLAIN))
    parser = argparse.ArgumentParser()
    assert deepspeed.add_config_arguments(parser) is parser
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")])
    assert args.deepspeed is True and parser.parse_args([]).deepspeed_config is None
    engine, *_ = deepspeed.initialize(args, torch.nn.Linear(4, 4))
    assert engine.train_batch_size() == 2
    engine.close()


def test_models_that_never_exist_whole_and_whole_params():
    with zero.Init(config_dict_or_path=PLAIN):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    with zero.Init(enabled=False):
        assert not torch.nn.Linear(1, 1).weight.is_meta
    for options in ({"module": model}, {"dtype": torch.bfloat16}, {"mpu": 1}, {"data_parallel_group": 1}):
        with pytest.raises(strata.InvalidArgument, match=f"zero.Init.{next(iter(options))}="):
            zero.Init(**options)
    weight = model[0].weight
    assert weight.is_meta
    with pytest.raises(strata.FailedPrecondition, match="no values before initialize: .*init_weights"):
        with zero.GatheredParameters(weight, modifier_rank=0):
            pass
    engine, *_ = deepspeed.initialize(model=model, config=changed("train_batch_size", 8), log=lambda *_: None)
    with contextlib.closing(engine):
        expected = engine.strata.state_dict()
        with zero.GatheredParameters(model.parameters()):
            assert all(torch.equal(p.data, expected[name]) for name, p in model.named_parameters())
        with zero.GatheredParameters([weight, torch.nn.Parameter(torch.ones(1))], fwd_module=model):
            assert torch.equal(weight, expected["0.weight"])
        with zero.GatheredParameters(weight, enabled=False), pytest.raises(strata.FailedPrecondition, match="released"):
            weight.sum()
        with pytest.raises(strata.FailedPrecondition, match=r"engine.strata.write\(param, value, root=0\)"):
            with zero.GatheredParameters(weight, modifier_rank=0):
                pass
        engine.strata.write(weight, torch.ones(4, 4))  # as the advice is
        assert engine.strata.read(weight).sum() == 16
    plain = torch.nn.Linear(2, 2)
    with zero.GatheredParameters(plain.weight, modifier_rank=0), torch.no_grad():
        plain.weight.zero_()  # of no engine: it is whole


DISTRIBUTED = """
import torch, strata.deepspeed as deepspeed
before = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), deepspeed.comm.get_local_rank()
deepspeed.init_distributed()
deepspeed.init_distributed("gloo")
after = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), deepspeed.comm.get_local_rank()
assert before == after
try:
    deepspeed.comm.barrier()
    barrier = "passed"
except Exception as error:
    barrier = type(error).__name__
print(*after, torch.distributed.is_initialized(), barrier)
"""


@pytest.mark.parametrize("environment,expected", [
    ({}, "0 1 0 True passed"),
    ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
     "3 4 1 False FailedPrecondition"),
    ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}, "1 2 0 False FailedPrecondition")])
def test_init_distributed(environment, expected):
    assert run(DISTRIBUTED, **environment).strip() == expected


def test_init_distributed_beside_the_engine(tmp_path):
    (tmp_path / "program.py").write_text(DISTRIBUTED.replace("print(", """
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config={"train_batch_size": 2})
assert (engine.global_rank, engine.local_rank, engine.world_size) == after[:1] + after[2:] + after[1:2]
engine.backward(engine(torch.ones(1, 4)).mean())
engine.step()
engine.close()
open(f"rank{after[0]}", "w").write(barrier)
print("""))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "hosts" / "python"), OMP_NUM_THREADS="1")
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["passed"] * 2


# ---- aio ----


def on_nvme(path, **aio):
    return {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "aio": aio, "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(path)}}}


def test_aio_is_what_the_disks_take(tmp_path):
    config = on_nvme(tmp_path, block_size=262144.0, queue_depth=16, single_submit=False, thread_count=2)
    manifest = deepspeed.read(config)
    found = tomllib.loads(manifest.text)["plugin"]["offload_nvme"]
    assert found == {"block_bytes": 262144, "queue_depth": 16}
    by_path = {key.path: key for key in manifest.keys}
    assert by_path["aio.block_size"].status == by_path["aio.queue_depth"].status == "mapped"
    assert "block_bytes of [plugin.offload_nvme]" in by_path["aio.block_size"].note
    assert all(by_path[f"aio.{name}"].status == "without effect" and "one queue" in by_path[f"aio.{name}"].note
               for name in ("single_submit", "thread_count"))
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)  # the plugin takes them
    engine.close()
    device = {"offload_param": {"device": "auto", "nvme_path": str(tmp_path)}, "stage": 3}
    later = deepspeed.read({"aio": {"queue_depth": 4}, "zero_optimization": device},
                           {"zero_optimization.offload_param.device": "nvme"})
    assert later.get("plugin.offload_nvme.queue_depth") == 4


@pytest.mark.parametrize("name,values", [("block_size", (0, 4096, 65537, 2**27, "1M", True, None)),
                                         ("queue_depth", (0, 1025, 1.5, "8"))])
def test_aio_out_of_range_is_refused_where_it_counts(name, values, tmp_path):
    for value in values:
        if value is not None:
            with pytest.raises(deepspeed.Refused, match=f"aio.{name} = .*a whole number from"):
                deepspeed.read(on_nvme(tmp_path, **{name: value}))
        manifest = deepspeed.read({"aio": {name: value}})
        assert "plugin" not in manifest.text
        line = f"aio.{name} = {json.dumps(value)}: without effect: nothing is on nvme"
        assert value is None or line in manifest.report()


def test_a_key_of_aio_that_nobody_knows_is_refused(tmp_path):
    with pytest.raises(deepspeed.Refused, match="aio.blok_size = 1: no known key, did you mean aio.block_size"):
        deepspeed.read(on_nvme(tmp_path, blok_size=1))
