"""strata.deepspeed: configurations, key by key, and a program written against DeepSpeed.

Its engine's calls are in test_deepspeed_engine.py.
"""
import json
import re
import tomllib

import pytest
import torch

import small_gpt
import strata
from conftest import ROOT
from deepspeed_table import DEFAULTS, REMOVED
from strata import deepspeed
from strata.deepspeed import config as reader
from strata.deepspeed import keys as rules

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


def config_of(path, value):
    config = {}
    *outer, last = path.split(".")
    part = config
    for name in outer:
        part = part.setdefault(name, {})
    part[last] = value
    return config


def paths(config, prefix=""):
    for name, value in config.items():
        yield from paths(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]


def status_line(config, path):
    return next(line for line in deepspeed.read(config).report() if line.startswith(path + " "))


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
    ("nebula.enabled", True, "DeepSpeed has removed it"), ("nebulae.enabled", True, "no known key"),
    ("zero_optimization.cpu_offload", False, "contradicts another key"),
    ("activation_checkpointing.cpu_checkpointing", True, "moving activations"),
    ("optimizer.params.lr", "auto", '"auto" has no value here'),
])
def test_what_cannot_be_had_is_refused_by_path(path, value, why):
    with pytest.raises(deepspeed.Refused) as error:
        deepspeed.read(changed(path, value))
    assert [key.path for key in error.value.keys] == [path] and why in str(error.value) and path in str(error.value)


# ---- DeepSpeed's own table ----


def test_every_key_of_deepspeed_is_known_at_its_default():
    """Each with an answer of its own, and none refused: its default asks for nothing that is not there."""
    given = {path: value for path, value in paths(DEFAULTS) if value is not None}
    reported = {key.path: key.status for key in deepspeed.read(DEFAULTS).keys}
    assert reported.keys() == given.keys() and set(reported.values()) <= {"honoured", "mapped", "without effect"}
    assert all(key.status == "without effect" for key in deepspeed.read(REMOVED).keys if key.path in REMOVED)
    known = {path for path, _ in paths(DEFAULTS)}
    free = [path for path in known - set(rules._RULES) if not path.startswith(tuple(rules._BLOCKS))]
    assert not free  # null is no excuse
    own = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "optimizer.params.max_grad_norm",
           "optimizer.params.momentum", "compile.enabled", "compile.backend", "aio.thread_count",
           "zero_optimization.zenflow.topk_ratio", "sparse_gradients", "zero_optimization.mics_shard_size"}
    assert own <= set(rules._RULES) - known  # of Strata, of other optimizers, and of older ones


def test_the_core_takes_what_those_defaults_are_here():
    text = deepspeed.read(DEFAULTS).text
    with strata.Engine(text=text, overrides=["log_level=\"error\""]) as engine:
        assert engine.setting("zero_optimization.model_persistence_threshold") == "9200000000000000000"
        assert engine.setting("zero_optimization.stage") == "3"


def test_one_word_too_many_in_any_block_is_no_known_key():
    blocks = {path.rpartition(".")[0] for path in rules._RULES} - {"zero_optimization.zenflow", "weight_quantization"}
    for path in sorted((block + "." * bool(block) + "nonsuch") for block in blocks):
        with pytest.raises(deepspeed.Refused, match=f"{path} = 1: no known key"):
            deepspeed.read(config_of(path, 1))


@pytest.mark.parametrize("path,near", [
    ("fp16.hystersis", "fp16.hysteresis"), ("bf16.enable", "bf16.enabled"),
    ("zero_optimization.offload_optimizer.pin_memry", "zero_optimization.offload_optimizer.pin_memory"),
    ("prefetch_bucket_size", "zero_optimization.prefetch_bucket_size"), ("tensorboard.job_nam", "tensorboard.job_name"),
    ("zenflow.topk_ratio", "zero_optimization.zenflow.topk_ratio"), ("checkpont.load_universal", "checkpoint.load_"),
])
def test_the_nearest_name_is_of_the_same_block(path, near):
    with pytest.raises(deepspeed.Refused, match=f"{path} = 1: no known key, did you mean {near}"):
        deepspeed.read(config_of(path, 1))


@pytest.mark.parametrize("path,value,why", [
    *((f"{monitor}.enabled", True, "no monitor is there: log engine.get_lr")
      for monitor in ("tensorboard", "wandb", "csv_monitor", "comet")),
    ("flops_profiler.enabled", True, "wall_clock_breakdown"), ("comms_logger.enabled", True, "counters"),
    ("gradient_allreduce_op", "SUM", "averaged over the ranks"), ("managed_gradient_accumulation", False, "says when"),
    ("sequence_parallel_size", 2, "not there"), ("datastates_ckpt", {}, "a writer of their own"),
    ("torch_autocast.enabled", True, "bf16.enabled"), ("data_types.grad_accum_dtype", "bf16", "added up in fp32"),
    ("data_types.param_dtype", "bf16", "bf16.enabled"), ("checkpoint.load_universal", True, "leave it out"),
    ("checkpoint.use_node_local_storage", True, "one folder"), ("checkpoint.writer.type", "mock", "writes nothing"),
    ("checkpoint.tag_validation", "loud", "Warn, Ignore and Fail"), ("compile.deepcompile", True, "torch.compile"),
    ("autotuning.enabled", True, "no tuner"), ("tensor_parallel.autotp_size", 4, "tensor_model_parallel_size"),
    ("expert_parallel.enabled", True, "not there"), ("pipeline.stages", 2, "pipeline_model_parallel_size"),
    ("hybrid_engine.enabled", True, "engine.eval"), ("data_efficiency.enabled", True, "data loader"),
    ("weight_quantization.num_bits", 8, "quantized weights"), ("log_level", "loud", "the levels are debug"),
    ("keep_in_fp32_modules", ["norm"], "dtype they are built with"),
    ("bf16.bf16_master_weights_and_grads", True, "are fp32"), ("bf16.bf16_optimizer_states", True, "are fp32"),
    ("optimizer.params.max_grad_norm", 1.0, "gradient_clipping"), ("optimizer.params.momentum", 0.9, "not there"),
    ("zero_optimization.offload_optimizer.super_offload", True, "split_update"),
    ("zero_optimization.zenflow", {}, "ZenFlow"), ("zero_optimization.zenflow.topk_ratio", 0.2, "ZenFlow"),
    ("zero_optimization.leaf_module.classes", ["Moe"], "with the class"),
    ("zero_optimization.ignore_unused_parameters", False, "no error"),
    ("zero_optimization.mics_shard_size", 4, "removed"), ("elasticity.enabled", True, "removed"),
    ("gradient_clipping", float("inf"), "a finite number"), ("no_such_block", {}, "no known key"),
])
def test_a_value_that_asks_for_what_is_not_there_is_refused(path, value, why):
    with pytest.raises(deepspeed.Refused, match=f"DeepSpeed configuration: {path} = .*{why}"):
        deepspeed.read(config_of(path, value))


def test_values_as_deepspeed_takes_them():
    zero = "zero_optimization."
    for path, value, status, setting in (
            ("optimizer.type", "adamw", "honoured", "AdamW"), ("optimizer.type", "ADAM", "honoured", "Adam"),
            ("communication_data_type", "BF16", "honoured", "bf16"), ("log_level", "warning", "mapped", "warn"),
            ("steps_per_print", float("inf"), "mapped", 0), (zero + "sub_group_size", 0, "mapped", None),
            (zero + "stage3_max_live_parameters", 0, "mapped", None),
            (zero + "sub_group_size", 1e9, "honoured", 1e9), (zero + "reduce_bucket_size", "500", "honoured", 500),
            (zero + "overlap_comm", "True", "honoured", True), (zero + "stage", "1", "honoured", 1),
            (zero + "stage3_gather_fp16_weights_on_model_save", True, "mapped", None)):
        found = deepspeed.read(config_of(path, value))
        assert (found.keys[0].path, found.keys[0].value, found.keys[0].status) == (path, value, status)
        assert found.get(path) == setting
    assert "one param at a time" in status_line(config_of(zero + "sub_group_size", 0), zero + "sub_group_size")
    assert deepspeed.read(config_of("zero_optimization", True)).get(zero + "stage") == 1
    assert deepspeed.read({"bf16": None, "zero_optimization": {"offload_param": None}}).get("bf16.enabled") is None
    with pytest.raises(strata.InvalidArgument, match="`zero_optimization.reduce_bucket_size` must be a whole number"):
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config={  # a text is a number only in digits, there as here
            "train_batch_size": 1, "zero_optimization": {"reduce_bucket_size": "5e8"}})


def test_adam_decays_apart_from_the_gradient_unless_told():
    """DeepSpeed's "Adam" does; the manifest's does not."""
    mode = "optimizer.params.adam_w_mode"
    assert deepspeed.read({"optimizer": {"type": "Adam"}}).get(mode) is True
    assert f"{mode} = true: honoured: DeepSpeed's default" in deepspeed.read({"optimizer": {"type": "Adam"}}).report()
    assert deepspeed.read({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}).get(mode) is False
    loop = deepspeed.read({"optimizer": {"type": "auto"}}, {"optimizer.type": "Adam"})  # a loop's torch.optim.Adam
    assert loop.get(mode) is None


@pytest.mark.parametrize("parts,pinned", [
    ({"offload_optimizer": {"device": "cpu"}}, ["offload_optimizer"]), ({}, []),
    ({"cpu_offload": True, "offload_param": {"device": "cpu"}}, ["offload_optimizer", "offload_param"]),
])
def test_the_older_word_for_pinned_memory(parts, pinned):
    config = {"zero_optimization": {"stage": 3, "cpu_offload_use_pin_memory": True, **parts}}
    found = deepspeed.read(config)
    for part in ("offload_optimizer", "offload_param"):
        assert found.get(f"zero_optimization.{part}.pin_memory") == (True if part in pinned else None)
    line = status_line(config, "zero_optimization.cpu_offload_use_pin_memory")
    assert ("mapped: pin_memory of what is offloaded" if pinned else "without effect") in line


@pytest.mark.parametrize("zero", [
    {"stage": 2, "offload_param": {"device": "cpu", "pin_memory": True}}, {"stage": 1, "cpu_offload_param": True},
    {"stage": 3, "offload_optimizer": {"device": "none", "pin_memory": True, "ratio": 0.5}},
    {"stage": 3, "offload_optimizer": {"device": "cpu", "buffer_count": 8, "fast_init": True}, "offload_param": {
        "device": "none", "pin_memory": False, "buffer_size": 1e8, "max_in_cpu": 1}},
    {"stage": 0, "max_live_parameters": 1, "stage3_max_reuse_distance": 0, "sub_group_size": 0},
    {"stage": 2.0, "prefetch_bucket_size": 5, "param_persistence_threshold": 5, "model_persistence_threshold": 9},
    {"stage": 3, "offload_optimizer": {"device": "cpu", "pipeline_read": False, "pipeline_write": True}},
    {"stage": 3, "cpu_offload_use_pin_memory": True, "offload_optimizer": {"device": "cpu"}},
    {"stage": 2, "offload_param": {"device": "nvme", "nvme_path": "/nowhere", "buffer_count": 5}},
])
def test_the_report_says_what_the_engine_says_has_no_effect(zero):
    warned = []

    def log(level, rank, text):
        warned.extend(re.findall(r"`(\S+)` has no effect", text))

    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(8, 8), log=log, config={
        "train_batch_size": 1, "zero_optimization": zero, "aio": {"queue_depth": 4}})
    engine.close()
    reported = {key.path.replace("stage3_", "").replace("cpu_offload_param", "offload_param.device")
                for key in deepspeed.read(engine.config).keys_on("cpu")
                if key.status == "without effect" and key.path != "aio.queue_depth"}
    section = {path for path in reported if "offload_param." in path} if zero["stage"] < 3 else set()
    assert {path.replace("stage3_", "") for path in warned} | section == reported  # its device is warned of, for all


@pytest.mark.parametrize("batch", [(7, 2, 2), (None, None, None)])
def test_batch_sizes_that_contradict_are_named_by_path(batch):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    with pytest.raises(strata.InvalidArgument) as error:
        deepspeed.initialize(model=torch.nn.Linear(2, 2),
                             config={name: value for name, value in zip(names, batch) if value})
    assert "manifest text" not in str(error.value) and all(name in str(error.value) for name in names)


def test_the_report_is_in_the_log_once(caplog):
    def work(rank):
        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), thread_rank=rank, config={
            "train_micro_batch_size_per_gpu": 1, "steps_per_print": float("inf"), "dump_state": False})
        engine.close()

    with caplog.at_level("INFO", logger="strata.deepspeed"):
        strata.run_threads(2, work)
    found = [(record.levelname, record.message) for record in caplog.records if record.name == "strata.deepspeed"]
    assert found == [("WARNING", "dump_state = false: without effect: settings are always logged"),
                     ("WARNING", "steps_per_print = Infinity: mapped: never, 0 here"),
                     ("INFO", "gradient_clipping = 1.0: honoured: DeepSpeed's default"),
                     ("INFO", "train_micro_batch_size_per_gpu = 1: honoured"),
                     ("WARNING", "the configuration names no optimizer: AdamW, with lr = 0.001, betas = 0.9, 0.999, "
                                 "weight_decay = 0")]


@pytest.mark.parametrize("max_live", [0, 1e9])
def test_a_preset_in_wide_use_trains(max_live):
    """axolotl's zero3_bf16_cpuoffload_all, with small matrices that are sharded all the same."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    engine, *_ = deepspeed.initialize(model=model, config={
        "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True, "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1, "wall_clock_breakdown": False, "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True}, "overlap_comm": True, "contiguous_gradients": True,
            "sub_group_size": 0, "max_live_parameters": max_live, "max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 10, "gather_16bit_weights_on_model_save": True}})
    engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
    assert engine.was_step_applied()
    engine.close()


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


@pytest.mark.parametrize("limit,gathered", [(80, 0), (79, 1), (63, 1), (8, 2), (7, 2)])
def test_params_that_stay_whole_are_capped_in_all(limit, gathered):  # [12]
    """A matrix of 64 elements, its bias of 8, and a matrix of 8."""
    def work(rank):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1, bias=False))
        engine, *_ = deepspeed.initialize(model=model, thread_rank=rank, units=[torch.nn.Linear], config={
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": {
                "stage": 3, "stage3_param_persistence_threshold": 64, "stage3_model_persistence_threshold": limit}})
        with torch.no_grad():
            engine(torch.ones(1, 8))
        calls = engine.strata.core.counters().gather_calls
        engine.close()
        return calls

    assert strata.run_threads(2, work) == [gathered] * 2


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


@pytest.mark.parametrize("offload, ranks, chosen", [
    ({}, 1, ['device="device_cuda"', 'optimizer="optim_adamw_cuda"']),
    ({"device": "none"}, 2, ['device="device_cuda"', 'collective="comm_nccl"', 'optimizer="optim_adamw_cuda"']),
    ({"device": "cpu"}, 2, ['device="device_cuda"', 'collective="comm_nccl"'])])
def test_gpus_that_torch_sees_are_trained_on(monkeypatch, offload, ranks, chosen):
    class Prepared(Exception):
        pass

    def prepare(*args, overrides, **options):
        raise Prepared(overrides)

    monkeypatch.setattr(deepspeed, "prepare", prepare)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(deepspeed.comm, "get_world_size", lambda: ranks)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, "offload_optimizer": offload}}

    def overrides(**options):
        with pytest.raises(Prepared) as caught:
            deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config, **options)
        return caught.value.args[0]

    chosen = [f"plugins.{plugin}" for plugin in chosen]
    assert overrides() == chosen
    assert overrides(overrides=["threads=1"]) == [*chosen, "threads=1"]
    assert overrides(thread_rank=0) == []
    assert overrides(overrides=['plugins.device="device_host"']) == ['plugins.device="device_host"']
