"""bench/side_by_side.py on the CPU: rows, what is skipped and why, time limits, processes, table and picture."""
import argparse
import collections
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


def test_rows_that_are_there_end_with_the_same_json(measured):
    out, _, _, last, _ = measured
    text, again, _ = call(out, "--no-measure", "--table")
    assert again["rows"] == last["rows"] and again["machine"] == last["machine"] and "**tiny**" in text
    assert again["not_measured"] == last["not_measured"]


def test_a_torn_line_is_passed_over_and_the_next_one_is_a_line(tmp_path, capsys):
    path, whole = tmp_path / "rows", json.dumps(line("strata_opt", 0.4))
    for torn, kept in (('{"job": "tin', 1), (whole, 2)):  # cut anywhere, or before its newline alone
        path.write_text(whole + "\n" + torn)
        file = rows.File(path)
        said = f"{path}: line 2 is torn, and passed over\n" if kept == 1 else ""
        assert len(file.lines) == kept and capsys.readouterr().err == said
        for mode in ("ds_opt", "ds_ratio"):
            file.append(line(mode, 1.5))
        assert [x["mode"] for x in rows.File(path).lines][kept:] == ["ds_opt", "ds_ratio"]
        assert capsys.readouterr().err == said
    out = tmp_path / "call"
    out.write_text('{"job": "tin')
    run = refused("--only", "tiny", "--modes", "plain", "--time-limit", "1", "--out", str(out), code=77)
    assert f"{out}: line 1 is torn" in run and len(rows.File(out).lines) == 1


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


def refused(*arguments, code=2, program=PROGRAM, **environment):
    """Standard error of a call that ends so, without a traceback."""
    run = subprocess.run([sys.executable, "-B", str(program), *arguments], env={**ENVIRONMENT, **environment},
                         capture_output=True, text=True, timeout=SECONDS)
    assert run.returncode == code and "Traceback" not in run.stderr, run.stdout + run.stderr
    return run.stderr


@pytest.mark.parametrize("program", ["side_by_side.py", "peers/measure.py"])
def test_counts_of_steps_that_measure_nothing_are_refused(program, tmp_path):
    given = ("--out", str(tmp_path / "rows")) if program == "side_by_side.py" else ("tiny", "plain")
    for wrong in (("--steps", "0"), ("--steps", "-1"), ("--warm", "-1")):
        said = refused(*given, *wrong, program=ROOT / "bench" / program)
        assert f"argument {wrong[0]}: {wrong[1]} is less than" in said
    assert not (tmp_path / "rows").exists()


def test_no_warm_steps_are_none(tmp_path):
    _, _, lines = call(tmp_path / "rows", "--only", "tiny", "--modes", "plain", "--steps", "2", "--warm", "0")
    assert lines["plain"]["warm"] == 0 and lines["plain"]["loss_after"] == 2


def test_one_row_by_hand_finds_strata(tmp_path):
    program = ROOT / "bench" / "peers" / "measure.py"
    bare = {name: value for name, value in ENVIRONMENT.items() if name not in ("PYTHONPATH", "STRATA_LIBRARY")}
    run = subprocess.run([sys.executable, "-B", str(program), "tiny", "strata_0", *SHORT], env=bare, cwd=tmp_path,
                         capture_output=True, text=True, timeout=SECONDS)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1])["loss_after"] == 3


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


def ratio(name, steps, monkeypatch, capsys, versions=None, gpus=1, disk=2e9):
    """(exit code or message, last line of vs_peer.py NAME as JSON) where rows take `steps` seconds."""
    machine = {"gpus": gpus, "machine": "a machine", "versions": {"torch": "2", "deepspeed": "1", **(versions or {})}}
    monkeypatch.setattr(runner, "describe_machine", lambda: machine)
    asked = []

    def measured(job, mode, world, arguments, seconds):
        asked.append(mode)
        assert mode in [row.mode for row in jobs.JOBS[job].rows] and world == 1 and seconds > 0
        return {"step_s": steps[mode]} if mode in steps else {"not_measured": "no room"}

    def disk_measured():
        asked.append("disk")
        return {"tier": disk, "fio": disk / 2} if disk else {}

    monkeypatch.setattr(vs_peer, "mixed_rates", disk_measured)
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
    code, asked, last = ratio("gpu_no_offload_vs_plain", {"plain32": 1.0, "strata_0": 1.02}, monkeypatch, capsys)
    assert code == 0 and asked == ["plain32", "strata_0"] and (last["value"], last["target"]) == (1.02, 1.03)
    assert last["pass"] and not last["not_measured"] and "disk_mb_s" not in last
    row = {"step_s": 1.02, "of_peer": 1.02, "goal": 1.03, "at_most_s": 1.03, "pass": True}
    assert last["rows"] == {"strata_0": row}
    code, _, last = ratio("gpu_no_offload_vs_plain", {"plain32": 1.0, "strata_0": 1.04}, monkeypatch, capsys)
    assert code == 0 and not last["pass"] and not last["rows"]["strata_0"]["pass"]


NVME_ROWS = ("strata_nvme", "strata_nvme_sm", "strata_nvme_half")
# Half of the state of 1.416 B params, 17 GB a step, takes 8.94 s at 0.95 of 2 GB/s.
NVME_STEPS = {"ds_nvmepipe": 20.0, "strata_nvme": 18.9, "strata_nvme_sm": 15.9, "strata_nvme_half": 8.9}


def test_each_row_on_disk_has_its_goal_and_its_rate(monkeypatch, capsys):
    code, asked, last = ratio("nvme_step_vs_deepspeed", NVME_STEPS, monkeypatch, capsys, disk=2e9)
    assert code == 0 and asked == ["disk", "ds_nvmepipe", "disk", "strata_nvme", "disk", "strata_nvme_sm", "disk",
                                   "strata_nvme_half", "disk"]
    assert (last["value"], last["target"], last["pass"], last["not_measured"]) == (0.945, 0.95, True, {})
    assert last["disk_mb_s"] == {"fio": 1000, "tier": 2000}
    assert [last["rows"][mode]["goal"] for mode in NVME_ROWS] == [0.95, 0.80, 0.50]
    params = jobs.SIZES["1.4b"].params
    moved = (24 * params, 20 * params, 24 * params - 2 * 8.5e9)
    for mode, bytes_a_step in zip(NVME_ROWS, moved):
        row = last["rows"][mode]
        assert row["disk_gb"] == round(bytes_a_step / 1e9, 2)
        assert row["disk_mb_s"] == round(bytes_a_step / NVME_STEPS[mode] / 1e6)
        assert row["of_disk"] == pytest.approx(bytes_a_step / NVME_STEPS[mode] / 2e9, abs=1e-4)
    assert last["rows"]["strata_nvme_half"]["at_most_s"] == pytest.approx(moved[2] / (0.95 * 2e9), abs=1e-3)
    assert last["rows"]["strata_nvme"]["at_most_s"] == 19  # the disk bounds the third alone


@pytest.mark.parametrize("mode, seconds", [("strata_nvme", 19.1), ("strata_nvme_sm", 16.1), ("strata_nvme_half", 10.1)])
def test_a_goal_that_is_missed_is_told_by_row(mode, seconds, monkeypatch, capsys):
    _, _, last = ratio("nvme_step_vs_deepspeed", {**NVME_STEPS, mode: seconds}, monkeypatch, capsys, disk=1e9)
    assert not last["pass"] and [row for row in NVME_ROWS if not last["rows"][row]["pass"]] == [mode]


def test_the_tighter_of_peer_and_disk_counts(monkeypatch, capsys):
    for disk, reached in ((1.7e9, True), (4e9, False)):  # 10.5 s and 4.5 s; half of the peer's is 10
        _, _, last = ratio("nvme_step_vs_deepspeed", {**NVME_STEPS, "strata_nvme_half": 9.9}, monkeypatch, capsys,
                           disk=disk)
        half = last["rows"]["strata_nvme_half"]
        assert half["pass"] == reached and half["at_most_s"] == (10 if reached else pytest.approx(4.47, abs=0.01))


def test_a_further_row_or_a_disk_that_is_not_measured_is_named(monkeypatch, capsys):
    steps = {mode: step for mode, step in NVME_STEPS.items() if mode != "strata_nvme_half"}
    code, _, last = ratio("nvme_step_vs_deepspeed", steps, monkeypatch, capsys, disk=2e9)
    assert code == 0 and last["value"] == 0.945 and not last["pass"]
    assert last["not_measured"] == {"strata_nvme_half": "no room"} and "strata_nvme_half" not in last["rows"]
    _, _, last = ratio("nvme_step_vs_deepspeed", NVME_STEPS, monkeypatch, capsys, disk=None)
    assert not last["pass"] and set(last["not_measured"]) == {"disk"} and last["disk_mb_s"] == {}
    assert last["rows"]["strata_nvme_half"]["at_most_s"] == 10 and "of_disk" not in last["rows"]["strata_nvme_half"]


def test_a_disk_that_cannot_be_measured_says_why(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(runner, "BUILD", tmp_path)
    assert vs_peer.mixed_rates() == {}
    assert "the disk is not measured" in (out := capsys.readouterr().out) and "bench_nvme_python.so" in out


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
            assert not jobs.goal_of(name, row.mode) or jobs.MODES[row.mode].is_ours
    used = {row.mode for job in jobs.JOBS.values() for row in job.rows}
    assert used == set(jobs.MODES)


def test_jobs_of_the_text_are_those_of_the_table():
    text = (ROOT / "docs" / "side_by_side.md").read_text()
    for size, digits in (("1.4b", 3), ("3.3b", 2), ("6.9b", 2), ("8b", 2)):
        assert f"{jobs.SIZES[size].params / 1e9:.{digits}f} B" in text
    assert all(f"`{name}`" in text for name in jobs.JOBS)


def chosen(*names, gpus=None, modes=None):
    return [(job, row.mode) for job, row in side_by_side.selected(names, modes, gpus)]


def test_a_jobs_name_means_its_variant_for_the_gpus():
    for names, gpus, meant in ((["optimizer"], 2, {"optimizer_2"}), (["optimizer_2"], None, {"optimizer_2"}),
                               (["optimizer", "optimizer_7b"], 1, {"optimizer", "optimizer_7b"}),
                               (["none", "none_2_3b"], 2, {"none_2", "none_2_3b"})):
        assert {job for job, _ in chosen(*names, gpus=gpus)} == meant
    assert chosen("optimizer", "params", gpus=2, modes=["fsdp_cpu"]) == [("optimizer_2", "fsdp_cpu")]
    assert {jobs.JOBS[job].gpus for job, _ in chosen(gpus=2)} == {2}


def test_a_selection_of_nothing_is_refused_with_what_there_is(tmp_path):
    for names, gpus, modes, why in (
            (["micro4"], 2, None, "job micro4 has no variant for 2 GPUs; jobs for 2: none_2, none_2_3b, optimizer_2, "),
            (["none"], 3, None, "job none has no variant for 3 GPUs; there are jobs for 0, 1, 2 GPUs"),
            ([], 3, None, "no job is for 3 GPUs; there are jobs for 0, 1, 2 GPUs"),
            (["tiny"], None, ["ds_ratio"], "no mode called ds_ratio is in tiny; there are plain, plain32, strata_0, ")):
        with pytest.raises(LookupError, match=why):
            chosen(*names, gpus=gpus, modes=modes)
    out = tmp_path / "rows"
    assert "no mode called ds_ratio is in tiny" in refused("--only", "tiny", "--modes", "ds_ratio", "--out", str(out))
    assert "there are jobs for 0, 1, 2" in refused("--gpus", "9", "--out", str(out)) and not out.exists()


def host_goal(job, mode):
    """Bytes a param, without those of the rest of the process."""
    job, goal = jobs.JOBS[job], jobs.goal_of(job, mode)
    if goal is None or goal.host_gib is None:
        return None
    return (goal.host_gib - 2 * job.world) * 2**30 / jobs.SIZES[job.size].params


def test_goals_of_host_memory_are_of_params_settings_and_ranks(monkeypatch):
    for job, mode, a_param in (
            ("optimizer", "strata_opt", 14), ("optimizer", "strata_opt_sm", 14), ("optimizer", "strata_opt_share", 14),
            ("params", "strata_optparam_split", 16), ("micro4", "strata_opt", 16), ("micro4", "strata_opt_split", 16),
            ("optimizer_2", "strata_opt", 14), ("params_2", "strata_optparam", 16), ("optimizer_7b", "strata_opt", 14),
            ("params_8b", "strata_optparam_sm", 16)):  # the last two have a goal of their own that allows more
        assert host_goal(job, mode) == pytest.approx(a_param), (job, mode)
    for job, mode in (("none", "strata_0"), ("none_2", "strata_3"), ("nvme", "strata_nvme"), ("optimizer", "ds_opt"),
                      ("nvme", "strata_nvmeall"), ("optimizer", "strata_opt_16"), ("optimizer", "strata_opt_ratio"),
                      ("tiny", "strata_opt"), ("optimizer", "strata_optparam"), ("params_2", "fsdp_cpu")):
        assert host_goal(job, mode) is None, (job, mode)
    assert jobs.host_goal_gib(jobs.JOBS["micro4"], jobs.MODES["strata_optparam"].settings) == pytest.approx(
        18 * jobs.SIZES["1.4b"].params / 2**30 + 2)
    stated = jobs.Goal(3.0, host_gib=100)  # less than the derived one
    monkeypatch.setitem(jobs.JOBS, "stated", jobs.Job("", "8b", (jobs.Row("strata_optparam", 1, stated),)))
    assert jobs.goal_of("stated", "strata_optparam") == stated
    assert jobs.goal_of("optimizer", "strata_opt").step_s == 0.50
    assert [(row.goal.step_s, row.goal.peak_gib) for job, mode in (("micro4", "strata_opt_split"),
                                                                   ("optimizer", "strata_opt_share"))
            for row in jobs.JOBS[job].rows if row.mode == mode] == [(1.05, None), (0.42, 10)]


Item = collections.namedtuple("Item", "what tier bytes")


def test_state_that_only_the_host_updates_is_not_page_locked():
    systems = pytest.importorskip("systems")
    plan = [Item("optimizer state", "cpu", 1000), Item("reduced gradients", "cpu", 100),
            Item("optimizer state", "device", 10_000)]
    pinned = {jobs.O + "device": "cpu", jobs.O + "pin_memory": True}
    assert systems.pinned_bytes(plan, pinned) == 100
    assert systems.pinned_bytes(plan, {**pinned, **split(0.4)}) == 500
    assert systems.pinned_bytes(plan, {**pinned, jobs.SPLIT: True}) == 1100  # a measured share: any part of it
    assert systems.pinned_bytes(plan, {**pinned, jobs.SHARE: 0.4}) == 100
    assert systems.pinned_bytes(plan, {**pinned, jobs.SPLIT: True, jobs.O + "pin_memory": False}) == 100


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
    host = "20.47 GiB of host"
    # The latest; torchao is another job.
    assert shown["strata_opt"][1:4] == ["0.4", "0.50 x ds_ratio†", f"0.5 s, {host}"]
    assert shown["strata_opt_split"][3] == f"0.42 s, 10 GiB, {host} (missed)"  # by its memory
    assert shown["strata_opt_24"][3] == "0.2 s, 24 GiB (missed)"
    assert "not measured: DeepSpeed, SuperOffload" in text and "deepspeed is not installed" in text
    assert "† measured in another call" in text


def test_a_goal_of_host_memory_is_missed_in_the_table(tmp_path):
    text = report.table(file_of(tmp_path / "rows", line("strata_opt", 0.4, host_gib=20.6),
                                line("strata_opt_split", 0.4, host_gib=20.4)))
    assert "| 0.5 s, 20.47 GiB of host (missed) |" in text and "| 0.42 s, 10 GiB, 20.47 GiB of host |" in text


def test_the_verdict_is_the_farthest_of_all_goals():
    def verdict(*lines):
        return side_by_side.summary(lines, "a machine")
    memory = verdict(line("strata_opt_split", 0.40, peak_gib=11.0), line("strata_opt", 0.49))
    assert memory["value"] == 1.1 and memory["against"] == "optimizer strata_opt_split: 11 device GiB, at most 10"
    host = verdict(line("strata_opt", 0.45, host_gib=30.0))
    assert host["value"] == pytest.approx(30 / 20.472, rel=1e-4) and "host GiB" in host["against"]
    assert verdict(line("strata_opt", 0.6))["value"] == 1.2
    assert verdict(line("ds_opt", 0.6))["value"] is None and verdict()["skipped"]
    tiny = [{**line(mode, seconds), "job": "tiny"} for mode, seconds in (("strata_opt", 0.5), ("ds_opt", 0.2))]
    assert verdict(*tiny)["value"] == 1.25 and verdict(tiny[0])["value"] is None  # times a peer of the same job


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


def test_nothing_to_draw_is_said(tmp_path):
    pytest.importorskip("matplotlib")
    failed = {**line("strata_opt", 1), "not_measured": "no room"}
    del failed["step_s"]
    for lines in ((), (failed,)):
        (tmp_path / "rows").write_text("".join(json.dumps(x) + "\n" for x in lines))
        said = refused("--no-measure", "--plot", str(tmp_path / "x.png"), "--out", str(tmp_path / "rows"), code=77)
        assert said == f"{tmp_path}/x.png is not drawn: {tmp_path}/rows: no row is measured that could be drawn\n"
    assert not (tmp_path / "x.png").exists()


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    report.plot(file_of(tmp_path / "rows", line("strata_opt", 0.4), line("ds_opt", 1.5)), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_in_the_picture_covers_a_text(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    lines = [line(row.mode, 0.402, tokens_s=12_345_678, loss=10.12345, host_gib=100.0, peak_gib=100.0)
             for row in jobs.JOBS["optimizer"].rows]
    longest = [{**line(mode, 2.0), "job": "params_8b"} for mode in ("strata_optparam_split_sm", "ds_optparam")]
    figure = report.draw(file_of(tmp_path / "rows", *lines, *longest, {**line("strata_opt", 1.0), "job": "micro4"}))
    pen = FigureCanvasAgg(figure).get_renderer()
    texts = [text for axis in figure.axes
             for text in (*axis.texts, *axis.get_yticklabels(), axis.title, axis._left_title) if text.get_text()]
    boxes = [text.get_window_extent(pen) for text in (*texts, *figure.texts)]
    marks = [mark.get_window_extent(pen) for axis in figure.axes for mark in (*axis.lines, *axis.patches)]
    assert {"0.402", "12,345,678", "10.1235 after 25"} <= {text.get_text() for text in texts}
    assert len(figure.axes) == 3 and len(marks) > len(lines)
    for place, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in (*boxes[place + 1:], *marks))
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1


def test_an_unknown_job_is_refused(tmp_path):
    run = subprocess.run([sys.executable, "-B", str(PROGRAM), "--only", "optimiser"], env=ENVIRONMENT,
                         capture_output=True, text=True, timeout=SECONDS)
    assert run.returncode == 2 and "no job is called optimiser" in run.stderr
