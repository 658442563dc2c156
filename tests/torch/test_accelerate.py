"""strata.accelerate: Accelerate's file, key by key, and loops written for accelerate, on one rank and on two."""
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import strata

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import hf  # noqa: E402 needs both
import test_transformers as models  # noqa: E402
from conftest import ROOT  # noqa: E402
from strata.accelerate import Accelerator, config, __main__ as launcher  # noqa: E402
from strata.deepspeed import Refused, read  # noqa: E402
from torch_ranks import on_gpus  # noqa: E402

PROGRAM = pathlib.Path(__file__).with_name("accelerate_program.py")
# What `accelerate config` writes for ZeRO-3 with offloading, with its questions answered.
FILE = """
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 2
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""


@pytest.fixture
def file(tmp_path):
    def write(text=FILE, **replaced):
        for old, new in replaced.items():
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "accelerate.yaml"
        path.write_text(text)
        return path
    return write


def test_directories_are_relative_to_the_file_that_names_them(file, tmp_path):
    path = file(**{"  offload_param_device: cpu\n": "  offload_param_device: nvme\n  offload_param_nvme_path: state\n"})
    manifest = read(config.read(path).deepspeed, {"train_micro_batch_size_per_gpu": 1})
    assert manifest.get("zero_optimization.offload_param.nvme_path") == f"{tmp_path}/state"


def test_accelerates_file(file):
    found = config.read(file())
    by_path = {key.path: key.status for key in found.keys}
    assert len(by_path) == 24 and "zero_stage" not in by_path
    mapped = {path for path, status in by_path.items() if status == "mapped"}
    assert mapped == {"mixed_precision", *("deepspeed_config." + name for name in (
        "gradient_accumulation_steps", "gradient_clipping", "offload_optimizer_device", "offload_param_device",
        "zero3_save_16bit_model", "zero_stage"))}
    assert {path for path, status in by_path.items() if status == "honoured"} == {
        "machine_rank", "num_machines", "num_processes", "use_cpu"}
    assert (found.mixed_precision, found.use_cpu, found.launch["num_processes"]) == ("bf16", True, 2)
    manifest = read(found.deepspeed, {"train_micro_batch_size_per_gpu": 4})
    zero = "zero_optimization."
    assert {key: manifest.get(key) for key in (
        "bf16.enabled", "gradient_accumulation_steps", "gradient_clipping", zero + "stage",
        zero + "offload_optimizer.device", zero + "offload_param.device",
        zero + "gather_16bit_weights_on_model_save")} == {
            "bf16.enabled": True, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0, zero + "stage": 3,
            zero + "offload_optimizer.device": "cpu", zero + "offload_param.device": "cpu",
            zero + "gather_16bit_weights_on_model_save": True}


@pytest.mark.parametrize("old,new,path,why", [
    ("zero_stage: 3", "zero_stag: 3", "deepspeed_config.zero_stag", "did you mean deepspeed_config.zero_stage?"),
    ("num_machines: 1", "num_machine: 1", "num_machine", "did you mean num_machines?"),
    ("distributed_type: DEEPSPEED", "distributed_type: FSDP", "distributed_type", "only DEEPSPEED"),
    ("distributed_type: DEEPSPEED", "", "distributed_type", "must say DEEPSPEED"),
    ("mixed_precision: bf16", "mixed_precision: fp16", "mixed_precision", "use bf16"),
    ("launcher: standard", "launcher: pdsh", "deepspeed_config.deepspeed_multinode_launcher", "yourself"),
    ("debug: false", "dynamo_config: {dynamo_backend: INDUCTOR}", "dynamo_config", "torch_compile to a Trainer"),
    ("debug: false", "fsdp_config: {fsdp_version: 2}", "fsdp_config", "not here"),
    ("zero_stage: 3", "deepspeed_moe_layer_cls_names: Moe", "deepspeed_config.deepspeed_moe_layer_cls_names",
     "units="), ("compute_environment: LOCAL_MACHINE", "compute_environment: AMAZON_SAGEMAKER",
                 "compute_environment", "only LOCAL_MACHINE"),
])
def test_keys_that_cannot_be_had(file, old, new, path, why):
    with pytest.raises(Refused, match="Accelerate configuration .*accelerate.yaml") as error:
        config.read(file(**{old: new}))
    assert [key.path for key in error.value.keys] == [path] and why in str(error.value)


def test_a_file_in_the_file(file, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(hf.CONFIG))
    text = f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {tmp_path / 'ds.json'}\n"
    assert config.read(file(text)).deepspeed == hf.CONFIG
    assert config.read(file(text + "mixed_precision: bf16\n")).deepspeed["bf16"] == {"enabled": True}
    with pytest.raises(Refused, match="deepspeed_config.zero_stage = 2: it is in deepspeed_config_file"):
        config.read(file(text + "  zero_stage: 2\n"))


def test_the_launchers_command(file):
    found = config.read(file())
    line, environment = launcher.command(found, {}, ["train.py", "--lr", "1"])
    assert line[1:] == ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "train.py", "--lr", "1"]
    assert environment == {"ACCELERATE_USE_CPU": "true"}
    several = {"num_machines": 2, "num_processes": 8, "machine_rank": 1, "main_process_ip": "10.0.0.1"}
    line, _ = launcher.command(found, several, ["train.py"])
    assert line[3:] == ["--nproc-per-node", "4", "--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1",
                        "--master-port", "29500", "train.py"]
    for wrong, why in (({"num_machines": 2, "num_processes": 3}, "num_processes = 3"),
                       ({"num_machines": 2, "num_processes": 2}, "main_process_ip")):
        with pytest.raises(strata.InvalidArgument, match=why):
            launcher.command(found, wrong, [])


@pytest.mark.parametrize("cpu, tolerance", [
    (True, hf.TOLERANCE), pytest.param(False, hf.GPU_TOLERANCE, marks=on_gpus(1))], ids=["CPU", "GPU"])
@pytest.mark.parametrize("make", [models.llama, models.bert], ids=["llama", "bert"])
def test_a_loop_written_for_accelerate(make, cpu, tolerance):
    runs = []
    for ours in (False, True):
        parts = hf.prepared(ours, make=make, cpu=cpu)
        runs.append((hf.loop(*parts), hf.evaluate(*parts[:2])))
        assert parts[0].unwrap_model(parts[1]) is parts[1] and parts[0].is_main_process
        parts[0].end_training()
    assert len(runs[0][0]) == 18 and hf.difference(runs[0][0], runs[1][0]) < tolerance
    assert torch.equal(runs[0][1], runs[1][1]) and len(runs[0][1]) == 7


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=40)


def decay_that_grows(optimizer):
    """A scheduler that changes weight_decay and eps, too."""
    class Growing(torch.optim.lr_scheduler.LambdaLR):
        def step(self, *args):
            super().step(*args)
            for group in self.optimizer.param_groups:
                group["weight_decay"] += 0.1
                group["eps"] *= 2

    return Growing(optimizer, lambda step: 1.0)


@pytest.mark.parametrize("schedule", [one_cycle, decay_that_grows])
def test_schedulers_of_more_than_the_learning_rate(schedule):
    runs = []
    for ours in (False, True):
        parts = hf.prepared(ours, schedule=schedule)
        runs.append(hf.loop(*parts))
        parts[0].end_training()
    assert hf.difference(*runs) < hf.TOLERANCE
    parts = hf.prepared(False, schedule=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.01, total_steps=40,
                                                                                     cycle_momentum=False))
    if schedule is one_cycle:  # the betas are what it is about
        assert hf.difference(runs[0], hf.loop(*parts)) > 100 * hf.TOLERANCE


def test_settings_that_cannot_be_taken():
    mine, model, optimizer, batches, _ = hf.prepared(True)
    batch = next(iter(batches))
    mine.gradient_state._set_sync_gradients(True)
    for part in range(2):
        mine.backward(model(**batch).loss)
    group = optimizer.param_groups[1]
    for name, value, why in (("lr", float("nan"), "lr is NaN"), ("betas", (0.9, float("nan")), "beta2 is NaN"),
                             ("maximize", True, "optimizer.step: maximize=True"), ("eps", -1.0, "group 2")):
        before, group[name] = group[name], value
        with pytest.raises(ValueError, match=why):
            optimizer.step()
        group[name] = before
    more = {"params": [torch.nn.Parameter(torch.ones(2))]}
    with pytest.raises(strata.FailedPrecondition, match="add_param_group after prepare"):
        optimizer.add_param_group(more)
    with pytest.raises(strata.FailedPrecondition, match="AdamW.step: it holds param"):
        optimizer.optimizer.step()  # torch's own, that the program may have kept
    optimizer.step()
    optimizer.optimizer.add_param_group(more)
    for part in range(2):
        mine.backward(model(**batch).loss)
    with pytest.raises(strata.FailedPrecondition, match="3 param groups, it was prepared with 2"):
        optimizer.step()
    mine.end_training()


def test_a_loop_after_a_backward_that_raised():
    """Caught by the loop, which goes on with the next batch, as it would with accelerate's own."""
    def run(fails):
        mine, model, optimizer, batches, scheduler = hf.prepared(True, steps=1)
        first, bad, last = [batch for _, batch in zip(range(3), batches)]
        for batch in (first, bad, last) if fails else (first, last):
            with mine.accumulate(model):
                loss = model(**batch).loss
                if batch is bad and fails:
                    handle = model.model.layers[0].mlp.up_proj.weight.register_hook(lambda _: 1 / 0)
                    with pytest.raises(ZeroDivisionError):
                        mine.backward(loss)
                    handle.remove()
                    for what, call in (("optimizer.step", optimizer.step), ("save_state", lambda: mine.save_state("x")),
                                       ("engine.backward", lambda: mine.backward(model(**last).loss))):
                        with pytest.raises(strata.FailedPrecondition, match=rf"{what}: .* call accelerator.engine."
                                                                            r"zero_grad\(\)"):
                            call()
                else:
                    mine.backward(loss)
                    optimizer.step()
                optimizer.zero_grad()
        found = mine.get_state_dict(model)
        assert mine.engine.core.info().steps == 2
        mine.end_training()
        return found

    clean, after = run(False), run(True)
    assert all(torch.equal(clean[name], value) for name, value in after.items())


def fail_in(monkeypatch, where, mine):
    """Lets the next save fail there, after it has written something."""
    if where == "accelerate's part":
        save = accelerate.accelerator.save_accelerator_state

        def failing(*args, **kwargs):
            save(*args, **kwargs)
            raise OSError("no space left")
        monkeypatch.setattr(accelerate.accelerator, "save_accelerator_state", failing)
    elif where == "the engine's part":
        def failing(root, tag):
            (root / (tag + ".partial")).mkdir()
            raise strata.DataLoss("no space left")
        monkeypatch.setattr(mine.engine, "save", failing)


@pytest.mark.parametrize("where", ["accelerate's part", "the engine's part", "refused"])
def test_a_save_that_fails_leaves_the_state_before_it(tmp_path, monkeypatch, where):
    mine, *parts = hf.prepared(True)
    model, optimizer, batches, scheduler = parts
    hf.loop(mine, *parts, epochs=1)
    mine.save_state(tmp_path / "a")
    rest = hf.loop(mine, *parts, epochs=1)
    if where == "refused":  # in the middle of a step
        mine.backward(model(**next(iter(batches))).loss)
    with monkeypatch.context() as patch:
        fail_in(patch, where, mine)
        with pytest.raises((OSError, strata.StrataError), match="no space left|micro-batches of an unfinished step"):
            mine.save_state(tmp_path / "a")
    mine.engine.zero_grad()
    mine.load_state(tmp_path / "a")
    assert mine.engine.core.info().steps == 5 and scheduler.scheduler.last_epoch == 5
    assert hf.loop(mine, *parts, epochs=1) == rest
    mine.save_state(tmp_path / "a")
    kept = {path.name: sum(inner.is_dir() for inner in path.iterdir()) for path in (tmp_path / "a").iterdir()}
    assert kept == {"strata": 1, "strata.accelerate": 1}
    mine.end_training()


def test_folders_that_accelerate_names(tmp_path, monkeypatch):
    hf.AcceleratorState._reset_state()
    naming = accelerate.utils.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    mine = Accelerator(config=hf.CONFIG, cpu=True, overrides=hf.QUIET, project_config=naming)
    model = models.llama()
    model, optimizer, batches = mine.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3),
                                             torch.utils.data.DataLoader(hf.Rows(), batch_size=4))
    with pytest.raises(strata.NotFound, match="no saved state"):
        mine.load_state()
    batch = next(iter(batches))

    def step():
        mine.backward(model(**batch).loss)
        optimizer.step()

    def there():
        return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())

    for number in range(3):
        step()
        assert mine.save_state() == str(tmp_path / "checkpoints" / f"checkpoint_{number}")
    assert there() == ["checkpoint_1", "checkpoint_2"]
    step()
    for where in ("accelerate's part", "the engine's part"):
        with monkeypatch.context() as patch:
            fail_in(patch, where, mine)
            with pytest.raises((OSError, strata.StrataError), match="no space left"):
                mine.save_state()
        assert there() == ["checkpoint_1", "checkpoint_2"] and mine.save_iteration == 3
    (tmp_path / "checkpoints" / "checkpoint_3" / "strata").mkdir(parents=True)  # of a save that was killed
    mine.load_state()
    assert mine.engine.core.info().steps == 3
    with pytest.raises(strata.InvalidArgument, match="checkpoint_3 is there already"):
        mine.save_state()
    mine.end_training()
    plain = hf.accelerator(True)
    plain.prepare(models.llama())
    for call in (plain.save_state, plain.load_state):
        with pytest.raises(strata.InvalidArgument, match="automatic_checkpoint_naming is off"):
            call()
    plain.end_training()


def test_states_go_on(tmp_path):
    mine, *parts = hf.prepared(True)
    hf.loop(mine, *parts, epochs=1)
    mine.save_state(tmp_path / "a")
    rest = hf.loop(mine, *parts, epochs=1)
    state = mine.get_state_dict(parts[0])
    mine.save_state(tmp_path / "b")
    mine.save_state(tmp_path / "b")  # in place of the first
    assert [path.name for path in (tmp_path / "b" / "strata").iterdir() if path.is_dir()] == ["step10-2"]
    mine.load_state(tmp_path / "a")
    assert hf.loop(mine, *parts, epochs=1) == rest
    mine.end_training()
    other, *parts = hf.prepared(True)
    other.load_state(tmp_path / "b")
    assert all(torch.equal(value, state[name]) for name, value in other.get_state_dict(parts[0]).items())
    other.save_model(parts[0], tmp_path / "c")
    weights = {"weights": str(tmp_path / "c" / "model.safetensors")}
    model = models.llama()
    with strata.torch.prepare(model, text="train_micro_batch_size_per_gpu = 1\ngradient_accumulation_steps = 1\n",
                              **weights) as engine:
        assert all(torch.equal(value, state[name]) for name, value in engine.state_dict().items())
    (tmp_path / "d").mkdir()
    with pytest.raises(strata.NotFound, match="no folder strata"):
        other.load_state(tmp_path / "d")
    other.save_engine(tmp_path / "d")
    with pytest.raises(strata.NotFound, match="was not saved by save_state; load_engine"):
        other.load_state(tmp_path / "d")
    other.end_training()


def test_what_the_configuration_and_the_loop_both_say():
    for changes, why in (({"train_micro_batch_size_per_gpu": 8}, "the first data loader's batch size per rank is 4"),
                         ({"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}, "the optimizer's lr is 0.003"),
                         ({"optimizer": {"type": "Adam"}}, "the loop's optimizer is \"AdamW\""),
                         ({"train_batch_size": 9}, "train_batch_size = 9: .* is 8")):
        with pytest.raises(Refused, match=why):
            hf.prepared(True, {**hf.CONFIG, **changes})
    with pytest.raises(strata.InvalidArgument, match="gradient_accumulation_steps=2.*the configuration has 3"):
        hf.accelerator(True, {**hf.CONFIG, "gradient_accumulation_steps": 3})
    taken = hf.accelerator(True, {**hf.CONFIG, "gradient_accumulation_steps": 3}, steps=1)
    assert taken.gradient_accumulation_steps == 3


def test_an_auto_that_nobody_knows():
    """The message says what there is to do here, and doing it helps."""
    model = models.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.utils.data.DataLoader(hf.Rows(), batch_size=4)
    with pytest.raises(Refused, match='train_micro_batch_size_per_gpu = "auto".*: "auto" has no value here: prepare '
                                      "the data loader in the same call as the model") as error:
        hf.accelerator(True).prepare(model, optimizer)
    assert "auto=" not in str(error.value)
    hf.accelerator(True).prepare(model, optimizer, batches)
    small = torch.nn.Linear(2, 2)
    with pytest.raises(Refused, match="the model has no config.hidden_size to take it from; write it in the"):
        hf.accelerator(True).prepare(small, torch.optim.AdamW(small.parameters()), batches)
    zero = {**hf.CONFIG["zero_optimization"], "stage3_gather_16bit_weights_on_model_save": "auto"}
    mine = hf.accelerator(True, {**hf.CONFIG, "zero_optimization": zero})
    model = models.llama()
    mine.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches)
    assert mine.engine.core.setting("gradient_clipping") == "1"  # accelerate's defaults
    assert mine.engine.core.setting("zero_optimization.gather_16bit_weights_on_model_save") == "false"
    mine.end_training()


def test_the_advice_about_fp16_is_good():
    config = {**hf.CONFIG, "fp16": {"enabled": True}, "bf16": {"enabled": False}}
    with pytest.raises(Refused, match="set fp16.enabled to false and bf16.enabled to true"):
        hf.prepared(True, config)
    mine, model, *_ = hf.prepared(True, {**config, "fp16": {"enabled": False}, "bf16": {"enabled": True}})
    assert mine.engine.core.setting("bf16.enabled") == "true"
    mine.end_training()


def test_what_is_not_offered_is_refused_by_name():
    mine = hf.accelerator(True)
    model = models.llama()
    for call, why in (
            (lambda: mine.clip_grad_value_([], 1.0), "Accelerator.clip_grad_value_ is not offered"),
            (lambda: mine.join_uneven_inputs([]), "join_uneven_inputs"), (lambda: mine.lomo_backward(1, 1), "lomo"),
            (lambda: mine.trigger_sync_in_backward(model), "trigger_sync_in_backward"),
            (lambda: mine.prepare(torch.optim.AdamW(model.parameters())), "without its model"),
            (lambda: mine.prepare(model, torch.optim.SGD(model.parameters(), lr=1)), "SGD is not an optimizer"),
            (lambda: mine.prepare(model, torch.optim.AdamW(model.parameters(), amsgrad=True)), "amsgrad=True"),
            (lambda: mine.prepare(model, torch.optim.AdamW(list(model.parameters())[:3])), "does not have 27"),
            (lambda: mine.prepare(model, models.bert()), "2 models"),
            (lambda: Accelerator(config=hf.CONFIG, mixed_precision="fp16"), "fp32 or bf16"),
            (lambda: Accelerator(config=hf.CONFIG, deepspeed_plugin=object()), "deepspeed_plugin=...\\): pass config="),
            (lambda: Accelerator(), "needs config")):
        with pytest.raises(strata.InvalidArgument, match=why):
            call()
    with pytest.raises(strata.FailedPrecondition, match="backward: call prepare"):
        mine.backward(torch.ones(1))


def test_the_loops_mistakes():
    mine, model, optimizer, batches, _ = hf.prepared(True)
    batch = next(iter(batches))
    with pytest.raises(strata.FailedPrecondition, match="no accelerator.backward since"):
        optimizer.step()
    with pytest.raises(strata.InvalidArgument, match="the norm is the 2-norm"):
        mine.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
    with pytest.raises(strata.InvalidArgument, match="one model; free_memory"):
        mine.prepare(models.bert())
    mine.backward(model(**batch).loss)
    norm = mine.clip_grad_norm_(model.parameters(), float("inf"))
    optimizer.step()
    assert float(norm) > 0 and not mine.optimizer_step_was_skipped
    mine.free_memory()
    mine.prepare(models.bert())
    mine.end_training()


def test_two_ranks_by_the_launcher(file, tmp_path):
    """The YAML file starts them; DDP is the reference. Then the state of two ranks goes on with one."""
    text = FILE.replace("mixed_precision: bf16", "mixed_precision: 'no'")
    command = [sys.executable, "-m", "strata.accelerate", "launch", "--config_file", str(file(text)), str(PROGRAM),
               str(tmp_path)]
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "hosts" / "python"), OMP_NUM_THREADS="1")
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr[-6000:]
    assert run.stdout.count("from the main process") == 1
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(found["plain"]) == 10 and hf.difference(found["plain"], found["ours"]) < hf.TOLERANCE
        assert found["predictions"] == found["plain predictions"] and found["resumed"] == found["rest"]
        assert any("offload_param_device" in line and "mapped" in line for line in found["report"])
    mine, *parts = hf.prepared(True)
    mine.load_engine(tmp_path / "state")
    assert mine.engine.core.info().steps == 3 and mine.num_processes == 1
    mine.end_training()
