"""bench/trace_picture.py: which part of a trace it draws, what it adds up, and its refusals."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench"))

import trace_picture  # noqa: E402

PROGRAM = ROOT / "bench" / "trace_picture.py"
ROWS = ["host", "collective", "update", "state in", "weights", "of a plugin"]
SPANS = [  # row, name, begin and end in milliseconds, step
    ("host", "forward", 0, 10, 4), ("host", "backward", 10, 14, 4), ("host", "backward", 15, 30, 4),
    ("collective", "agree", 28, 31, 4), ("collective", "wait for reductions", 28, 30, 4),
    ("host", "forward", 32, 60, 5), ("host", "fetch", 32, 45, 5), ("host", "wait for update", 33, 44, 5),
    ("update", "updates", 31, 55, 4), ("update", "wait for transfers", 40, 42, 4), ("update", "update", 42, 50, 4),
    ("state in", "wait", 31, 35, 4), ("state in", "state in", 35, 50, 4), ("weights", "to tier", 50, 51, 4),
    ("host", "backward", 60, 80, 5)]


def content(spans=SPANS):
    names = [{"name": "thread_name", "ph": "M", "pid": 0, "tid": k, "args": {"name": name}}
             for k, name in enumerate(ROWS)]
    return {"traceEvents": names + [{"name": name, "ph": "X", "pid": 0, "tid": ROWS.index(row), "ts": 1e3 * begin,
                                     "dur": 1e3 * (end - begin), "args": {"step": step}}
                                    for row, name, begin, end, step in spans]}


@pytest.fixture
def trace():
    return trace_picture.Trace(content())


def test_a_step_goes_from_its_first_backward_to_the_next_ones(trace):
    assert trace.steps() == [4] and trace.window(4) == (10, 60)
    assert trace.ends("agree", 4) == 31 and trace.ends("updates", 4) == 55 and trace.ends("updates", 5) is None


def test_rows_have_what_is_in_the_window(trace):
    rows = trace.rows(10, 60)
    assert list(rows) == ["host", "collective", "update", "state in", "weights"]  # one has nothing
    assert ("forward", 22, 50, 5) in rows["host"] and ("backward", 5, 20, 4) in rows["host"]
    assert not any(step == 5 and name == "backward" for name, _, _, step in rows["host"])
    assert trace.rows(35, 37)["update"] == [("updates", 0, 2, 4)]  # cut


def test_time_is_counted_once_and_waits_are_not_work(trace):
    rows = trace.rows(10, 60)
    assert trace_picture.works_and_waits(rows["host"]) == (19 + 28 - 11, 11)
    assert trace_picture.works_and_waits(rows["update"]) == (22, 2)
    assert trace_picture.works_and_waits(rows["state in"]) == (15, 4)


def test_what_has_waits_is_drawn_below_them(trace):
    rows = trace.rows(10, 60)
    assert [span[0] for span in trace_picture.in_order_of_drawing("host", rows["host"])] == [
        "backward", "backward", "forward", "wait for update"]
    assert [span[0] for span in trace_picture.in_order_of_drawing("update", rows["update"])] == [
        "updates", "wait for transfers", "update"]
    assert [span[0] for span in trace_picture.in_order_of_drawing("collective", rows["collective"])] == [
        "agree", "wait for reductions"]


def test_kinds():
    kinds = (("weights", "to tier", "copied to the device"), ("reductions", "take in", "copied to the host"),
             ("state in", "state in", "copied to the device"), ("update", "update", "update"),
             ("collective", "gather", "bookkeeping, collectives"))
    for row, name, kind in kinds:
        assert trace_picture.kind_of(row, name) == kind
    assert set(trace_picture.KIND_OF.values()) | set(trace_picture.ON_STREAM.values()) <= trace_picture.KINDS.keys()


def run(tmp_path, spans, *arguments, **environment):
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(content(spans)))
    return subprocess.run([sys.executable, "-B", str(PROGRAM), str(path), str(tmp_path / "x.png"), *arguments],
                          env={**os.environ, **environment}, capture_output=True, text=True, timeout=100)


def test_without_matplotlib_it_is_refused_by_name(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('there is none here')")
    refused = run(tmp_path, SPANS, PYTHONPATH=str(tmp_path))
    assert refused.returncode == 1 and refused.stderr == "a picture needs matplotlib: there is none here\n"
    assert not (tmp_path / "x.png").exists()


def test_a_step_that_is_not_whole_is_refused(tmp_path):
    (tmp_path / "matplotlib.py").touch()
    for spans, arguments, why in ((SPANS[:-1], (), "no step that has its backward and the next one's in it"),
                                  (SPANS, ("--step", "5"), "step 5 is not one that has its backward"),
                                  ([], (), "there are none")):
        refused = run(tmp_path, spans, *arguments, PYTHONPATH=str(tmp_path))
        assert refused.returncode == 1 and why in refused.stderr and "Traceback" not in refused.stderr


def test_a_file_that_is_no_trace_is_refused_in_a_line(tmp_path):
    (tmp_path / "matplotlib.py").touch()
    other = json.dumps({"traceEvents": [{"name": "x", "ph": "X", "ts": 1, "dur": 1}]})
    for text, why in ((None, "No such file or directory"), ("{}", "no trace of an engine: KeyError('traceEvents')"),
                      ("[1]", "no trace of an engine"), (other, "no trace of an engine"), ("{", "Expecting property")):
        path = tmp_path / f"given{text is None}.json"
        if text is not None:
            path.write_text(text)
        refused = subprocess.run([sys.executable, "-B", str(PROGRAM), str(path), str(tmp_path / "x.png")],
                                 env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
                                 timeout=100)
        assert refused.returncode == 1 and refused.stderr.startswith(f"{path}: ") and why in refused.stderr
        assert refused.stderr.count("\n") == 1


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    drawn = run(tmp_path, SPANS, "--title", "a step")
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
