"""The Python host against the engine: errors, questions, checkpoints, and the lifetime of engines and processes."""
import copy
import gc
import logging
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from host_library import BUILD, ROOT
from host_model import SHAPES, gradient, initial, open_engine, reference, register, text
import strata

CHECKPOINT = pytest.mark.skipif(not (BUILD / "lib" / "plugins" / "checkpoint.so").exists(),
                                reason="the checkpoint plugin was not built")

# ---- errors ----------------------------------------------------------------------------------------------------------


def step(engine, unit, params, number):
    with engine.fetch(unit):
        for name, p in params.items():
            p.grad(gradient(name, number, engine.rank, p.view()))
    unit.grads_done()
    engine.end_backward()
    engine.step()


@pytest.mark.parametrize("told", [True, False])
def test_an_exception_of_one_rank_is_heard_by_the_others(told):
    """That it was, where it leaves the with-block; where it does not, that the rank closed."""
    def work(rank):
        engine = open_engine(3, thread_rank=rank)
        with engine:
            unit, params = register(engine)
            step(engine, unit, params, 1)
            if rank.rank == 1 and told:
                raise KeyError("no sample 7\0\ud800")
            if rank.rank == 0:
                with pytest.raises(strata.StrataError) as error:
                    for number in range(2, 9):
                        step(engine, unit, params, number)
                        engine.wait()
                heard.append(str(error.value))

    heard = []
    if told:
        with pytest.raises(KeyError):
            strata.run_threads(2, work)
    else:
        strata.run_threads(2, work)
    assert ("rank 1: KeyError: 'no sample 7" in heard[0]) == told


def test_ranks_that_read_other_arrays_both_hear_of_it():
    def work(rank):
        with open_engine(3, thread_rank=rank) as engine:
            unit, params = register(engine)
            step(engine, unit, params, 1)
            with pytest.raises(strata.StrataError) as error:
                params["w"].read(("exp_avg", "master")[rank.rank])
            return str(error.value)

    for text in strata.run_threads(2, work):
        assert "exp_avg" in text and "master" in text


def test_a_refused_group_leaves_nothing():
    with open_engine() as engine:
        with pytest.raises(strata.InvalidArgument, match="lr is -1"):
            engine.group(lr=-1.0)
        group = engine.group(lr=0.5)
        unit = engine.unit("layer")
        params = {name: unit.param(name, shape, group=group) for name, shape in SHAPES.items()}
        engine.commit()
        step(engine, unit, params, 1)
        assert engine.info().applied_steps == 1


def test_units_and_params_of_another_engine_are_refused():
    with open_engine() as one, open_engine() as other:
        mine, foreign = one.unit("a"), other.unit("b")
        param = foreign.param("p", (4,))
        with pytest.raises(strata.InvalidArgument, match="another engine"):
            mine.param("q", (4,), tied_to=param)
        mine.param("q", (4,))
        one.commit()
        with pytest.raises(strata.InvalidArgument, match="another engine"), one.fetch(foreign):
            pass


@pytest.mark.parametrize("use", [
    lambda v: v.argmax(), lambda v: v.nonzero(), lambda v: v.repeat(2), lambda v: v.flat, lambda v: v.dumps(),
    lambda v: v.searchsorted(1.0), lambda v: 1.0 in v, lambda v: v.sum(), lambda v: v.tobytes(), lambda v: f"{v}",
    lambda v: copy.deepcopy(v), lambda v: bool(v[:1])])
def test_a_view_is_refused_after_its_release_and_after_close(use):
    engine = open_engine()
    unit, params = register(engine)
    with engine.fetch(unit):
        view = params["b"].view()
        use(view)
    with pytest.raises(strata.FailedPrecondition, match="the view ended"):
        use(view)
    engine.close()
    with pytest.raises(strata.FailedPrecondition, match="the view ended"):
        use(view)


def test_weights_on_a_device_have_no_view_in_numpy():
    plugins = BUILD / "tests" / "plugins"
    if not (plugins / "gpu_sim.so").exists():
        pytest.skip("the simulated GPU was not built")
    simulated = [f'plugins.{role}="gpu_sim"' for role in ("device", "collective", "optimizer")]
    with open_engine(extra=[f'plugins.path=["{plugins}"]', *simulated]) as engine:
        unit, params = register(engine)
        with engine.fetch(unit), pytest.raises(strata.FailedPrecondition, match='param "w".*memory of its own'):
            params["w"].view()
        np.testing.assert_array_equal(params["w"].read(), initial("w"))


@CHECKPOINT
def test_what_a_checkpoint_has_beyond_the_model_is_a_warning(tmp_path):
    lines = []

    def open_with(names):
        engine = open_engine(extra=["log_level=info"], log=lambda level, domain, line: lines.append((level, line)))
        unit = engine.unit("layer")
        params = {name: unit.param(name, (4,)) for name in names}
        engine.commit()
        return engine, params

    engine, params = open_with("abc")
    with engine:
        for number, param in enumerate(params.values()):
            param.write(np.full(4, number, np.float32))
        engine.save(tmp_path, "t")
    assert any(line.endswith(f'checkpoint "{tmp_path}/t": written, step 0') for _, line in lines)
    engine, params = open_with("b")
    with engine:
        engine.load(tmp_path)
        np.testing.assert_array_equal(params["b"].read(), np.ones(4))
    assert any(f'checkpoint "{tmp_path}/t": loaded, step 0, written by 1 rank' in line for _, line in lines)
    warned = [line for level, line in lines if level == logging.WARNING]
    assert len(warned) == 1
    assert warned[0].endswith('2 of its params are not of this model, and are left unread: "a", "c"')


@pytest.mark.parametrize("end", ["raise KeyError('no sample 7')", "sys.exit(3)"])
def test_an_exception_that_ends_a_program_is_heard_by_the_other_ranks(end, tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(f"""
import sys
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
from test_host_calls import open_engine, register, step
engine = open_engine(3)
unit, params = register(engine)
step(engine, unit, params, 1)
if engine.rank == 1:
    {end}
for number in range(2, 9):
    step(engine, unit, params, number)
    engine.wait()
""")
    ranks = [subprocess.Popen([sys.executable, program], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                              env=os.environ | {"STRATA_RANK": str(rank), "STRATA_WORLD_SIZE": "2",
                                                "STRATA_JOB": f"ends-{os.getpid()}-{len(end)}"}) for rank in range(2)]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert ranks[1].returncode == (3 if "exit" in end else 1), errors[1]
    assert ranks[0].returncode == 1 and "rank 1" in errors[0], errors[0]
    assert ("rank 1: KeyError: 'no sample 7'" in errors[0]) == ("raise" in end), errors[0]


def test_a_wrong_key_names_place_and_neighbour(tmp_path):
    manifest = tmp_path / "train.toml"
    manifest.write_text(text() + "stages = 3\n")
    with pytest.raises(strata.InvalidArgument) as error:
        strata.Engine(manifest)
    line = len(manifest.read_text().splitlines())
    assert str(error.value).startswith(f"{manifest}:{line}:1: ")
    assert "zero_optimization.stages" in str(error.value) and "zero_optimization.stage`?" in str(error.value)
    assert error.value.code == 3 and isinstance(error.value, strata.StrataError)


def test_wrong_arguments():
    with pytest.raises(strata.InvalidArgument, match="overrides"):
        strata.Engine(text=text(), overrides="zero_optimization.stage=1")
    with pytest.raises(strata.InvalidArgument, match="either a manifest path or"):
        strata.Engine()
    with pytest.raises(strata.NotFound):
        strata.Engine("/does/not/exist.toml")
    with open_engine() as e:
        unit = e.unit("u")
        with pytest.raises(strata.AlreadyExists, match='"u"'):
            e.unit("u")
        with pytest.raises(strata.InvalidArgument, match="NUL"):
            unit.param("a\0b", (3,))
        with pytest.raises(strata.InvalidArgument, match="fp32.*'fp8'"):
            unit.param("a", (3,), dtype="fp8")
        with pytest.raises(strata.InvalidArgument, match="negative"):
            unit.param("a", (-3,))
        p = unit.param("a", (3,))
        with pytest.raises(strata.FailedPrecondition, match="commit"):
            p.grad(np.ones(3, np.float32))
        e.commit()
        with pytest.raises(strata.FailedPrecondition, match="registration ended"):
            e.unit("late")
        with pytest.raises(strata.InvalidArgument, match='"a".*shape'):
            p.grad(np.ones(4, np.float32))
        with pytest.raises(strata.InvalidArgument, match='"a".*shape'):
            p.write(np.ones((3, 1), np.float32))
        for refused in (np.ones(3), np.ones(3, ">f4"), [1.0, 2.0, 3.0]):
            with pytest.raises(strata.InvalidArgument, match='"a".*float32'):
                p.grad(refused)
        with pytest.raises(strata.NotFound, match="moment3"):
            p.read("moment3")
        with pytest.raises(strata.NotFound, match="no_such"):
            e.setting("no_such")


def test_wrong_order():
    with open_engine() as e:
        unit, params = register(e)
        with pytest.raises(strata.FailedPrecondition, match="0 of 1 micro-batches"):
            e.step()
        e.end_backward()
        e.step()
        with pytest.raises(strata.FailedPrecondition, match="0 of 1 micro-batches"):
            e.step()  # a second step without gradients
        with e.fetch(unit):
            with pytest.raises(strata.FailedPrecondition, match="still fetched"):
                params["w"].write(initial("w"))
        unit.grads_done()
        with pytest.raises(strata.FailedPrecondition, match="declared done"):
            params["w"].grad(initial("w"))
        e.end_backward()
        e.step()  # every refusal left the engine usable
        assert e.info().steps == 2


def test_a_non_contiguous_gradient_is_taken_as_it_reads():
    with open_engine() as e:
        _, params = register(e)
        params["w"].grad(np.ascontiguousarray(initial("w").T).T)
        e.end_backward()
        np.testing.assert_array_equal(params["w"].read("grad"), initial("w"))


def test_a_missing_library_lists_the_paths_tried(tmp_path):
    code = ("import strata\ntry: strata.version()\nexcept strata.LibraryNotFound as e: print(e)")
    env = dict(os.environ, PYTHONPATH=str(ROOT / "hosts" / "python"))
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")

    def run():
        done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
        return done.stdout

    env["STRATA_LIBRARY"] = str(tmp_path / "absent.so")
    told = run()
    assert f"{tmp_path}/absent.so: no such file" in told and "cmake --build --preset release" in told
    env["STRATA_LIBRARY"] = str(broken)
    assert f"{broken}: " in run() and "no such file" not in run()
    package = tmp_path / "strata"
    package.mkdir()
    for file in (ROOT / "hosts" / "python" / "strata").glob("*.py"):
        (package / file.name).write_text(file.read_text())
    del env["STRATA_LIBRARY"]
    env["PYTHONPATH"] = str(tmp_path)
    assert f"{package}/lib/libstrata.so: no such file" in run()


def test_the_first_rank_to_fail_is_the_error():
    def work(rank):
        if rank.rank == 1:
            raise ValueError("this one")
        with open_engine(thread_rank=rank, extra=["deadline_seconds=0.5"]):
            pass

    with pytest.raises(ValueError, match="this one") as error:
        strata.run_threads(2, work)
    assert "rank 1 of 2" in error.value.__notes__[0]


# ---- what is going on ------------------------------------------------------------------------------------------------


def test_questions():
    lines = []
    with open_engine(stage=3, extra=["log_level=info"], log=lambda *line: lines.append(line)) as e:
        unit, params = register(e)
        assert (e.rank, e.world, e.setting("zero_optimization.stage")) == (0, 1, "3")
        plan = e.plan()
        assert {item.tier for item in plan} <= {"device", "cpu", "nvme"}
        state = next(item for item in plan if item.what == "optimizer state")
        assert state.bytes >= 12 * (37 * 65 + 65 + 1)
        assert any(level == 20 and "plan: " in line and "optimizer state" in line for level, _, line in lines)
        before = e.counters()
        with e.fetch(unit):
            pass
        params["w"].grad(initial("w"))
        e.end_backward()
        e.step()
        after = e.counters()
        assert after.fetches == before.fetches + 1 and len(after.tier_read) == 3
        assert after.grad_bytes - before.grad_bytes == initial("w").nbytes
        assert e.counters(last_step=True).grad_bytes == initial("w").nbytes
        e.wait()
    assert strata.version().count(".") == 2


def test_a_log_callback_that_raises_harms_nothing(monkeypatch):
    def log(level, domain, line):
        raise RuntimeError("from the log callback")

    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reported.append(str(report.exc_value)))
    with open_engine(extra=["log_level=info"], log=log) as e:
        register(e)
    assert "from the log callback" in reported  # said, and the engine goes on


def test_a_log_callback_cannot_call_the_engine():
    refused = []

    def log(level, domain, line):
        if opened:
            with pytest.raises(strata.FailedPrecondition, match="callback") as error:
                opened[0].wait()
            refused.append(str(error.value))

    opened = []
    with open_engine(extra=["log_level=info"], log=log) as e:
        opened.append(e)
        register(e)  # commit logs the plan on this thread
        opened.clear()
    assert refused


def test_meta_is_like_a_dict():
    with open_engine() as e:
        e.meta["tokens"] = "12"
        assert e.meta["tokens"] == "12" and "tokens" in e.meta and "epoch" not in e.meta
        assert e.meta.get("epoch", "0") == "0"
        with pytest.raises(KeyError):
            e.meta["epoch"]
        with pytest.raises(TypeError, match="str"):
            e.meta["tokens"] = 12


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@CHECKPOINT
def test_save_and_load(tmp_path):
    def steps(e, unit, params, first, last):
        for step in range(first, last):
            with e.fetch(unit):
                for name, p in params.items():
                    p.grad(gradient(name, step, 0, p.view()))
            e.end_backward()
            e.step()

    with open_engine(stage=3) as e:
        unit, params = register(e)
        steps(e, unit, params, 1, 3)
        e.save(tmp_path, "two")
        e.meta["tokens"] = "99"
        e.save(tmp_path, "two")  # in place of the first
        steps(e, unit, params, 3, 5)
        whole = {name: p.read("master") for name, p in params.items()}
        e.export_weights(tmp_path / "weights.h5")
        with pytest.raises(strata.AlreadyExists, match="a file of this name exists"):
            e.export_weights(tmp_path / "weights.h5")
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "mine.txt").touch()
        with pytest.raises(strata.AlreadyExists, match="has 'mine.txt' in it"):
            e.save(tmp_path, "notes")
        assert (tmp_path / "weights.h5").stat().st_size > whole["w"].nbytes

    def resume(rank):
        with open_engine(stage=1, thread_rank=rank) as e:
            unit, params = register(e)
            e.load(tmp_path)
            assert e.meta["tokens"] == "99" and e.info().steps == 2
            steps(e, unit, params, 3, 5)
            return {name: p.read("master") for name, p in params.items()}

    for resumed in strata.run_threads(2, resume):
        for name in SHAPES:
            np.testing.assert_allclose(resumed[name], whole[name], rtol=0, atol=1e-6)
    with open_engine() as e:
        register(e)
        with pytest.raises(strata.NotFound, match="absent"):
            e.load(tmp_path, "absent")


# ---- lifetime --------------------------------------------------------------------------------------------------------


def usage():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_opening_and_closing_leaves_nothing_behind():
    def once(explicit):
        e = open_engine(stage=3)
        unit, params = register(e)
        params["w"].grad(initial("w"))
        e.end_backward()
        e.step()
        if explicit:
            e.close()  # joins the update under way

    once(True)
    before = usage()
    for i in range(50):
        once(i % 2 == 0)  # every other one is only forgotten
        gc.collect()
    assert usage() == before
    with pytest.raises(strata.InvalidArgument):
        strata.Engine(text="nonsense = 1")
    assert usage() == before


def test_exit_without_close_and_a_forked_child():
    code = f"""
import os, signal, sys, numpy as np
sys.path[:0] = [{str(ROOT / 'tests' / 'python')!r}]
import host_model, strata
e = host_model.open_engine(stage=3)
unit, params = host_model.register(e)
child = os.fork()
if child == 0:
    signal.alarm(20)
    try: e.wait()
    except strata.FailedPrecondition as error: sys.exit(7 if "fork" in str(error) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
params["w"].grad(host_model.initial("w")); e.end_backward(); e.step()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_processes_find_their_rank_in_the_environment():
    code = f"""
import sys
sys.path[:0] = [{str(ROOT / 'tests' / 'python')!r}]
import host_model
print(float(host_model.train(3, steps=2)["w"]["weight"].sum()))
"""
    env = dict(os.environ, STRATA_WORLD_SIZE="2", STRATA_JOB=f"test-host-{os.getpid()}")
    ranks = [subprocess.Popen([sys.executable, "-c", code], env=dict(env, STRATA_RANK=str(r)), stdout=subprocess.PIPE,
                              text=True) for r in range(2)]
    printed = [float(rank.communicate(timeout=60)[0]) for rank in ranks]
    assert printed[0] == printed[1] == pytest.approx(reference(2, steps=2)["w"].w.sum(), abs=1e-4)
