"""bench/side_by_side.py on the CPU: rows, what is skipped and why, time limits, processes, table and picture."""
import argparse
import json
import os
import pathlib
import subprocess
import sys

import pytest

from conftest import BUILD, ROOT

sys.path += [str(ROOT / "bench" / "peers"), str(ROOT / "bench")]

import jobs  # noqa: E402
import report  # noqa: E402
import rows  # noqa: E402
import runner  # noqa: E402
import side_by_side  # noqa: E402
import vs_peer  # noqa: E402

PROGRAM, SECONDS = ROOT / "bench" / "side_by_side.py", 200
SHORT = ("--steps", "2", "--warm", "1")
ENVIRONMENT = {**os.environ, "STRATA_BUILD_DIR": str(BUILD), "OMP_NUM_THREADS": "1"}


def call(out, *arguments, code=0, **environment):
    """(standard output, the JSON of its last line, the file's lines)"""
    run = subprocess.run([sys.executable, "-B", str(PROGRAM), "--out", str(out), *arguments],
                         env={**ENVIRONMENT, **environment}, capture_output=True, text=True, timeout=SECONDS)
    assert run.returncode == code, run.stdout + run.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return run.stdout, json.loads(run.stdout.splitlines()[-1]), {line["mode"]: line for line in lines}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    out = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    modes = "plain,plain32,strata_0,strata_opt,strata_optparam,torchao"
    return out, modes, *call(out, "--only", "tiny", "--modes", modes, *SHORT, "--table")


def test_rows_have_their_figures(measured):
    _, modes, text, last, lines = measured
    assert list(lines) == [row.mode for row in jobs.JOBS["tiny"].rows if row.mode in modes.split(",")]
    assert last["rows"] == 5 and [left.split(":")[0] for left in last["not_measured"]] == ["tiny torchao"]
    for mode, line in lines.items():
        assert f"tiny {mode}: " in text
        assert {"key", "date", "commit", "machine", "versions", "settings", "call"} <= line.keys()
        if mode == "torchao":
            assert line["not_measured"]  # not installed, or not for the CPU
            continue
        assert line["step_s"] > 0 and line["host_gib"] > 0.1 and line["loss_after"] == 3
        assert line["tokens_s"] == pytest.approx(2 * 64 / line["step_s"], rel=0.02)
        assert line["params"] == jobs.SIZES["tiny"].params


def test_every_system_trains_the_same_model(measured):
    lines = measured[-1]
    for mode in ("strata_opt", "strata_optparam"):
        assert lines[mode]["losses"] == lines["strata_0"]["losses"] and lines[mode]["loss"] == lines["strata_0"]["loss"]
    for mode in ("plain32", "plain"):
        assert lines[mode]["losses"][0] == lines["strata_0"]["losses"][0]
    assert lines["plain32"]["loss"] == pytest.approx(lines["strata_0"]["loss"], abs=1e-3)


def test_bytes_of_the_counters_are_those_of_the_formula(measured):
    line = measured[-1]["strata_opt"]
    assert line["host_link_formula"] == 4 * line["params"]
    assert line["host_link_bytes"] == pytest.approx(line["host_link_formula"], rel=0.02)  # slices are padded


def test_the_table_names_rows_and_reasons(measured):
    text = measured[2]
    assert "| Strata, optimizer on CPU (`strata_opt`) |" in text and "x plain32" in text
    assert "another job: no fp32 master" in text and "- not measured: torchao" in text
    assert f"**tiny**: {jobs.title_of(jobs.JOBS['tiny'])}. 2 steps after 1; loss after 3" in text


def test_what_is_there_is_not_measured_again(measured):
    out, _, _, _, lines = measured
    before = out.read_text()
    text, last, _ = call(out, "--only", "tiny", "--modes", "plain,plain32", *SHORT)
    assert out.read_text() == before and text.count("is there") == last["rows"] == 2
    again = call(out, "--only", "tiny", "--modes", "plain", "--steps", "3", "--warm", "1")[2]
    assert again["plain"]["key"] != lines["plain"]["key"] and again["plain"]["steps"] == 3


def test_rows_are_the_same_by_job_mode_settings_machine_and_version():
    machine = {"machine_id": "a", "versions": {"torch": "2", "deepspeed": "1", "torchao": None}}

    def key(row=jobs.Row("strata_opt", 1), job="optimizer", steps=20, machine=machine, build="b"):
        return rows.identity(job, row, 5, steps, machine, build)
    newer = {**machine, "versions": {**machine["versions"], "deepspeed": "2"}}
    ds = jobs.Row("ds_opt", 1)
    assert key() == key(jobs.Row("strata_opt", 2, jobs.Goal(1))) == key(machine=newer)
    assert key(ds) == key(ds, build="other") != key(ds, machine=newer)
    others = [key(build="other"), key(steps=3), key(job="micro4"), key(machine={**machine, "machine_id": "z"}),
              key(jobs.Row("strata_opt", 1, None, {"threads": 2})), key(jobs.Row("strata_opt_sm", 1))]
    assert len({key(), *others}) == 1 + len(others)


def test_no_row_is_started_that_cannot_end_in_time(tmp_path):
    _, last, lines = call(tmp_path / "rows", "--only", "tiny", "--modes", "plain,strata_0", "--time-limit", "5",
                          code=77)
    assert last["skipped"] and last["rows"] == 0 and list(lines) == ["plain", "strata_0"]
    assert all("no time: it takes about" in line["not_measured"] for line in lines.values())


def rank_processes():
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if any(word.endswith("bench/peers/measure.py") for word in words):
            found.append(process.name)
    return found


def test_a_row_that_outlasts_its_time_is_ended_with_all_its_processes():
    before = set(rank_processes())
    figures = runner.run("tiny", "plain", 2, ["--steps", "1000000"], 8)
    assert "ended after 8 s, its deadline" in figures["not_measured"]
    assert not set(rank_processes()) - before


def test_a_setting_that_is_refused_is_reported_with_the_reason():
    figures = runner.run("tiny", "strata_0", 1, ["zero_optimization.no_such_key=1", *SHORT], 60)
    assert "no_such_key" in figures["not_measured"] and "unknown key" in figures["not_measured"]


RANKS = """
import os, pathlib, sys, time
rank = int(os.environ["RANK"])
if "dies" in sys.argv and rank == 1:
    print("this is why", flush=True)
    os.kill(os.getpid(), 9)
if "reports" in sys.argv and rank == 1:
    pathlib.Path(sys.argv[sys.argv.index("--out") + 1]).write_text('{"not_measured": "no room"}')
    sys.exit(1)
if "lingers" in sys.argv:
    pathlib.Path(sys.argv[sys.argv.index("--out") + 1]).write_text('{"step_s": 1, "peak_gib": null, "engine_gib": 0, '
                                                                   '"in_use_gib": null, "host_gib": 2}')
time.sleep(1000)
"""


@pytest.fixture
def fake_ranks(tmp_path, monkeypatch):
    (tmp_path / "measure.py").write_text(RANKS)
    monkeypatch.setattr(runner, "HERE", tmp_path)
    monkeypatch.setattr(runner, "AFTER_A_FAILURE", 1)
    monkeypatch.setattr(runner, "AFTER_FIGURES", 1)


def test_a_rank_that_dies_ends_the_row(fake_ranks):
    figures = runner.run("tiny", "plain", 2, ["dies"], 10_000)
    assert figures["not_measured"] == "rank 1 ended with -9; its last line: this is why"


def test_a_rank_that_says_why_it_fails_ends_the_row(fake_ranks):
    assert runner.run("tiny", "plain", 2, ["reports"], 10_000) == {"not_measured": "no room"}


def test_ranks_that_linger_with_their_figures_out_are_ended(fake_ranks):
    assert runner.run("tiny", "plain", 2, ["lingers"], 10_000)["host_gib"] == 4


def test_two_ranks_are_one_row():
    one, two = (runner.run("tiny", "strata_3", world, [*SHORT], 100) for world in (1, 2))
    assert two["losses"] == pytest.approx(one["losses"], abs=2e-3)
    assert two["host_gib"] > 1.5 * one["host_gib"]


def ratio(name, steps, monkeypatch, capsys, versions=None, gpus=1):
    """(exit code or message, last line of vs_peer.py NAME as JSON) where rows take `steps` seconds."""
    machine = {"gpus": gpus, "machine": "a machine", "versions": {"torch": "2", "deepspeed": "1", **(versions or {})}}
    monkeypatch.setattr(runner, "describe_machine", lambda: machine)
    asked = []

    def measured(job, mode, world, arguments, seconds):
        asked.append(mode)
        assert mode in [row.mode for row in jobs.JOBS[job].rows] and world == 1 and seconds > 0
        return {"step_s": steps[mode]} if mode in steps else {"not_measured": "no room"}
    monkeypatch.setattr(runner, "run", measured)
    monkeypatch.setattr(sys, "argv", ["vs_peer.py", name])
    try:
        vs_peer.main()
        code = 0
    except SystemExit as end:
        code = end.code
    lines = capsys.readouterr().out.splitlines()
    return code, asked, json.loads(lines[-1]) if lines else None


def test_the_ratio_to_a_peer(monkeypatch, capsys):
    steps = {"ds_nvmepipe": 20.0, "strata_nvme": 15.0, "strata_nvme_sm": 12.0}
    code, asked, last = ratio("nvme_step_vs_deepspeed", steps, monkeypatch, capsys)
    assert code == 0 and asked == ["ds_nvmepipe", "strata_nvme", "strata_nvme_sm", "strata_nvme_half"]
    assert last == {"name": "nvme_step_vs_deepspeed", "value": 0.75, "target": 0.95, "unit": "x", "better": "lower",
                    "against": "DeepSpeed, optimizer on NVMe, pipelined, same machine", "machine": "a machine",
                    "others": {"strata_nvme_sm": 0.6}}
    code, asked, last = ratio("gpu_no_offload_vs_plain", {"plain32": 1.0, "strata_0": 1.02}, monkeypatch, capsys)
    assert code == 0 and asked == ["plain32", "strata_0"] and (last["value"], last["target"]) == (1.02, 1.03)


def test_a_ratio_without_one_of_its_rows_is_an_error(monkeypatch, capsys):
    for known, missing in (("strata_nvme", "ds_nvmepipe"), ("ds_nvmepipe", "strata_nvme")):
        code, asked, last = ratio("nvme_step_vs_deepspeed", {known: 1.0}, monkeypatch, capsys)
        assert code == f"nvme_step_vs_deepspeed: {missing}: no room" and asked[-1] == missing == last["mode"]


@pytest.mark.parametrize("name, versions, gpus, reason", [
    ("nvme_step_vs_deepspeed", {"torch": None}, 0, f"no torch in {sys.executable}"),
    ("nvme_step_vs_deepspeed", {}, 0, "torch sees no GPU"),
    ("nvme_step_vs_deepspeed", {"deepspeed": None}, 1, f"deepspeed is not installed in {sys.executable}"),
    ("gpu_no_offload_vs_plain", {"deepspeed": None}, 0, "torch sees no GPU")])
def test_a_ratio_that_cannot_be_measured_here_is_skipped(name, versions, gpus, reason, monkeypatch, capsys):
    code, asked, last = ratio(name, {}, monkeypatch, capsys, versions, gpus)
    assert code == 77 and not asked and (last["name"], last["value"], last["skipped"]) == (name, None, reason)


def test_bench_run_knows_the_ratios():
    command = [ROOT / "bench" / "run"]
    listed = subprocess.run([*command, "--list"], capture_output=True, text=True, timeout=SECONDS).stdout.split()
    assert set(vs_peer.FIGURES) <= set(listed)
    for name in vs_peer.FIGURES:
        run = subprocess.run([*command, name], env={**ENVIRONMENT, "STRATA_PYTHON": sys.executable,
                                                    "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
                             timeout=SECONDS)
        assert run.returncode == 77, run.stdout + run.stderr
        assert json.loads(run.stdout.splitlines()[-1])["skipped"] == "torch sees no GPU"


def test_the_table_of_jobs_is_sound():
    for name, job in jobs.JOBS.items():
        modes = [row.mode for row in job.rows]
        assert len(set(modes)) == len(modes) and job.size in jobs.SIZES, name
        for row in job.rows:
            assert row.mode in jobs.MODES and row.expected > 0
            assert not (row.goal and row.goal.times) or row.goal.times[1] in modes
            assert not row.goal or jobs.MODES[row.mode].is_ours
    used = {row.mode for job in jobs.JOBS.values() for row in job.rows}
    assert used == set(jobs.MODES)


def per_param(job, on_device=0.0, **settings):
    named = {jobs.O + "device": "cpu", **settings}
    found = jobs.host_link_bytes(jobs.JOBS[job], named, on_device)
    return found and found / jobs.SIZES[jobs.JOBS[job].size].params


def split(share, **more):
    return {jobs.SPLIT: True, jobs.SHARE: share, **more}


def test_formula_of_the_bytes_between_host_and_device():
    assert per_param("optimizer") == pytest.approx(4)
    for share in (0.0, 0.25, 0.4, 1.0):
        assert per_param("optimizer", **split(share)) == pytest.approx(4 + 24 * share)
        assert per_param("optimizer", 0.5, **split(share)) == pytest.approx((4 + 24 * share) / 2)
    assert per_param("micro4") == pytest.approx(4 * 2 + 2)  # each micro-batch's leave, and are added up by the host
    assert per_param("micro4", **split(1.0)) == pytest.approx(4 * 2 + 4 + 24)
    assert per_param("micro4", **{jobs.BUDGET: 1e9}) is None  # of how many params sums stay
    assert jobs.crossing(3, False, 0.0, False, ranks=2) == 3 * 4 + 2  # reduced in fp32
    assert per_param("optimizer_2") == pytest.approx(2)
    assert per_param("optimizer", **{jobs.LAYOUT: "split"}) == pytest.approx(6)  # and the old weights
    assert per_param("optimizer", **split(1.0, **{jobs.LAYOUT: "split"})) == pytest.approx(24)
    assert per_param("optimizer", 1.0) == 0 == per_param("optimizer", **{jobs.O + "device": "none"})
    for unknown in ({jobs.SPLIT: True}, {jobs.O + "device": "nvme"}):
        assert per_param("optimizer", **unknown) is None


def test_formula_where_params_lie_in_host_memory_too():
    there = {jobs.P + "device": "cpu"}
    size = jobs.SIZES["1.4b"]
    blocks, once = 24 * 12 * 2048**2, (2 * 50304 + 1024) * 2048
    resident = 24 * 13 * 2048 + 2 * 2048
    assert size.params == blocks + once + resident
    fetched = 2 * (2 * blocks + once)
    for job, whole in (("params", 1), ("params_2", 0.5)):
        assert per_param(job, **there) * size.params == pytest.approx(
            whole * (fetched + 2 * (blocks + once) + 4 * resident), rel=1e-9)
        assert per_param(job, **split(1.0, **there)) * size.params == pytest.approx(
            whole * (fetched + 30 * (blocks + once) + 28 * resident), rel=1e-9)
        both = split(0.5, **there, **{jobs.LAYOUT: "split"})  # gradients out; half of them in, with state both ways
        assert per_param(job, **both) * size.params == pytest.approx(
            whole * (fetched + (2 + (2 + 24) / 2) * (blocks + once) + (2 + (2 + 20) / 2 + 4 / 2) * resident), rel=1e-9)
    assert per_param("params", 0.5, **there) is None and per_param("tiny", **there) is None


def line(mode, seconds, call="now", **more):
    return {"job": "optimizer", "mode": mode, "key": mode, "machine": "a machine", "machine_id": "m", "call": call,
            "step_s": seconds, "peak_gib": 8.0, "host_gib": 20.0, "tokens_s": 1, "loss": 1.5, "steps": 20, "warm": 5,
            "loss_after": 25, "commit": "c", "versions": {"torch": "2"}, "date": "2026-01-01T00:00", **more}


def file_of(path, *lines):
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
    return rows.File(path)


def test_goals_and_ratios(tmp_path):
    failed = {**line("ds_super", 0), "not_measured": "deepspeed is not installed"}
    del failed["step_s"]
    text = report.table(file_of(
        tmp_path / "rows", line("torchao", 0.3), line("strata_opt", 0.6), line("ds_opt", 1.5),
        line("ds_ratio", 0.8, "then"), line("strata_opt", 0.4), line("strata_opt_split", 0.4, peak_gib=11.0),
        line("strata_opt_24", 0.25), failed))
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines() if row.startswith("|")]
    shown = {words[0].split("`")[1]: words for words in cells if "`" in words[0]}
    assert list(shown) == ["strata_opt", "ds_opt", "strata_opt_split", "torchao", "ds_ratio", "strata_opt_24"]
    assert shown["strata_opt"][1:4] == ["0.4", "0.50 x ds_ratio†", "0.5 s"]  # the latest; torchao is another job
    assert shown["strata_opt_split"][3] == "0.42 s, 10 GiB (missed)"         # by its memory
    assert shown["strata_opt_24"][3] == "0.2 s, 24 GiB (missed)"
    assert "not measured: DeepSpeed, SuperOffload" in text and "deepspeed is not installed" in text
    assert "† measured in another call" in text


def obstacle(job, mode, installed=("torch",)):
    run = object.__new__(side_by_side.Run)
    run.args = argparse.Namespace(time_limit=None)
    versions = {name: "1" if name in installed else None for name in ("torch", "deepspeed", "torchao")}
    run.machine = {"gpus": 1, "host_bytes": 128 * 2**30, "versions": versions}
    return run.obstacle(jobs.JOBS[job], jobs.MODES[mode], 10)


def test_what_cannot_be_measured_is_named():
    both = ["torch", "deepspeed"]
    assert obstacle("optimizer", "ds_opt", both) == ""
    assert obstacle("optimizer", "ds_opt") == "deepspeed is not installed"
    assert obstacle("optimizer", "torchao", both) == "torchao is not installed"
    assert "torch is not installed" in obstacle("none", "plain", [])
    assert obstacle("none_2", "fsdp") == "needs 2 GPU, the machine has 1"
    assert obstacle("optimizer_7b", "ds_opt", both) == ""
    assert "about 26 bytes of host memory per param are 195 GiB" in obstacle("params_8b", "ds_optparam", both)


def test_a_plot_without_matplotlib_is_refused_by_name(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('there is none here')")
    run = subprocess.run([sys.executable, "-B", str(PROGRAM), "--plot", str(tmp_path / "x.png"), "--no-measure"],
                         env={**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
                         timeout=SECONDS)
    assert run.returncode == 2 and "a plot needs matplotlib: there is none here" in run.stderr


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    report.plot(file_of(tmp_path / "rows", line("strata_opt", 0.4), line("ds_opt", 1.5)), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_job_is_refused(tmp_path):
    run = subprocess.run([sys.executable, "-B", str(PROGRAM), "--only", "optimiser"], env=ENVIRONMENT,
                         capture_output=True, text=True, timeout=SECONDS)
    assert run.returncode == 2 and "no job is called optimiser" in run.stderr
