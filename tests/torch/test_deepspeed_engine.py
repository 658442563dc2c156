"""strata.deepspeed's engine: checkpoints with what travels along, what programs ask it, zero, comm."""
import argparse
import collections
import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys

import pytest
import torch

import strata
from conftest import ROOT
from strata import deepspeed
from strata.deepspeed import alternatives, comm, zero
from test_deepspeed import CONFIG

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
    engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, "train_batch_size": 8}, log=lambda *_: None)
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
        with pytest.raises(strata.FailedPrecondition, match='"0.weight" of unit .* was written'):
            with zero.GatheredParameters(weight), torch.no_grad():
                weight.fill_(7)
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
