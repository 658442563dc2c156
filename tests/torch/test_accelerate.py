"""strata.accelerate: Accelerate's file, key by key, and loops written for accelerate, on one rank and on two."""
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import strata

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

import hf  # noqa: E402 needs both
import test_transformers as models  # noqa: E402
from conftest import ROOT  # noqa: E402
from strata.accelerate import Accelerator, config, __main__ as launcher  # noqa: E402
from strata.deepspeed import Refused, read  # noqa: E402

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


@pytest.mark.parametrize("make", [models.llama, models.bert], ids=["llama", "bert"])
def test_a_loop_written_for_accelerate(make):
    runs = []
    for ours in (False, True):
        parts = hf.prepared(ours, make=make)
        runs.append((hf.loop(*parts), hf.evaluate(*parts[:2])))
        assert parts[0].unwrap_model(parts[1]) is parts[1] and parts[0].is_main_process
        parts[0].end_training()
    assert len(runs[0][0]) == 18 and hf.difference(runs[0][0], runs[1][0]) < hf.TOLERANCE
    assert torch.equal(runs[0][1], runs[1][1]) and len(runs[0][1]) == 7


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
