"""strata.deepspeed: configurations, key by key, and a program written against DeepSpeed.

Its engine's calls are in test_deepspeed_engine.py.
"""
import json
import tomllib

import pytest
import torch

import small_gpt
import strata
from conftest import ROOT
from strata import deepspeed
from strata.deepspeed import config as reader

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
        with pytest.raises(strata.AlreadyExists, match="rank 0"):
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
