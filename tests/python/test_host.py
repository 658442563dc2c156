"""The Python host against the engine: training, ranks as threads, params and views.

Training is compared with AdamW written in numpy in fp64. Run with Debian's numpy: /usr/bin/python3 -m pytest.
STRATA_BUILD_DIR names the build (default build/release).
"""
import numpy as np
import pytest

from host_model import SHAPES, AdamW, assert_trained, initial, open_engine, reference, register, train, wave
import strata

# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_is_adamw(stage, micro):
    assert_trained(train(stage, micro), reference(1, micro))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_as_threads(stage):
    results = strata.run_threads(2, lambda rank: train(stage, thread_rank=rank))
    assert_trained(results[0], reference(2))
    for name in SHAPES:
        for array, values in results[0][name].items():
            np.testing.assert_array_equal(values, results[1][name][array])


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_stay_alive_until_end_backward(stage):
    # The engine reads the host's own arrays at the reduction: without the references these temporaries would be gone.
    extra = ["zero_optimization.contiguous_gradients=false"]
    assert_trained(train(stage, extra=extra), reference(1))


def test_gradients_are_held_only_where_the_engine_reads_them_late():
    for contiguous, held in (("true", 0), ("false", 1)):
        with open_engine(extra=[f"zero_optimization.contiguous_gradients={contiguous}"]) as e:
            unit, params = register(e)
            params["w"].grad(initial("w"))
            assert len(e._gradients) == held
            e.end_backward()
            assert len(e._gradients) == 0


def test_bf16_weights_and_gradients():
    with open_engine() as e:
        unit, params = register(e, "bf16")
        model = AdamW(initial("w"))
        for step in range(1, 4):
            g = strata.to_bfloat16(wave("w", step, 0.02))  # exact: bf16 in, bf16 on the wire
            params["w"].grad(g)
            e.end_backward()
            e.step(lr=0.01)
            model.step([strata.to_float32(g)], 0.01)
        master = params["w"].read("master")
        np.testing.assert_allclose(master, model.w, rtol=0, atol=1e-6)
        nearest = ((master.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)  # ties away from zero
        np.testing.assert_array_equal(params["w"].read("weight", dtype="bf16").view(np.uint16), nearest)
        with e.fetch(unit):
            np.testing.assert_array_equal(np.asarray(params["w"].view()).view(np.uint16), nearest)
            weight = params["w"].float32()
        np.testing.assert_array_equal(weight.view(np.uint32), nearest.astype(np.uint32) << 16)


@pytest.mark.skipif(np.dtype(strata.bfloat16).names is None, reason="ml_dtypes is installed")
def test_bf16_bits_never_compute_in_silence():
    with open_engine() as e:
        unit, params = register(e, "bf16")
        with e.fetch(unit):
            view = params["w"].view()
            for compute in (lambda: view + 1, lambda: view * 0.5, lambda: view @ view, lambda: np.sum(view)):
                with pytest.raises(TypeError):
                    compute()
        bits = np.zeros(params["w"].shape, np.uint16)
        with pytest.raises(strata.InvalidArgument, match="uint16"):  # integers are not weights, nor bits by guess
            params["w"].grad(bits)
        params["w"].grad(bits.view(strata.bfloat16))
        e.end_backward()


def test_groups_frozen_and_tied_params():
    with open_engine(stage=3) as e:
        slow = e.group(lr=0.001, betas=(0.9, 0.99), weight_decay=0)
        first, last = e.unit("embed"), e.unit("head")
        w = first.param("embed.w", (8, 16))
        s = first.param("embed.s", (16,), group=slow)
        f = first.param("embed.f", (5,), frozen=True)
        tied = last.param("head.w", (8, 16), tied_to=w)
        e.commit()
        for p in (w, s, f):
            p.write(np.ones(p.shape, np.float32))
        with e.fetch(last):
            np.testing.assert_array_equal(tied.view(), np.ones((8, 16)))
            owner = w.view()  # the tied name brings the owner's unit
        with pytest.raises(strata.FailedPrecondition, match='unit "embed"'):
            owner + 1
        with pytest.raises(strata.FailedPrecondition, match="frozen"):
            f.grad(np.ones(5, np.float32))
        for p in (w, tied):
            p.grad(np.full((8, 16), 0.5, np.float32))
        s.grad(np.ones(16, np.float32))
        e.end_backward()
        e.step(group_lr={slow: 0.002})
        np.testing.assert_array_equal(w.read("grad"), np.ones((8, 16)))  # the sum over both names
        # AdamW's first update is lr in size, whatever the gradient.
        np.testing.assert_allclose(w.read(), np.full((8, 16), 1 - 0.01 * 0.1 - 0.01), rtol=1e-6)
        np.testing.assert_allclose(s.read(), np.full(16, 1 - 0.002), rtol=1e-6)
        np.testing.assert_array_equal(f.read(), np.ones(5))
        with pytest.raises(strata.NotFound, match='"exp_avg"'):
            f.read("exp_avg")


def one_param_per_group(e):
    """(the params, the group of the second), each 1 everywhere and with a gradient of 2."""
    slow, unit = e.group(lr=0.001, weight_decay=0), e.unit("u")
    params = [unit.param("a", (3,)), unit.param("b", (5,), group=slow)]
    e.commit()
    for p in params:
        p.write(np.ones(p.shape, np.float32))
    gradients_of_2(e, params)
    return params, slow


def gradients_of_2(e, params):
    for p in params:
        p.grad(np.full(p.shape, 2, np.float32))
    e.end_backward()


def test_settings_of_one_step():
    with open_engine(stage=1) as e:
        (a, b), slow = one_param_per_group(e)
        e.step(groups={None: {"weight_decay": 0.5, "betas": (0.75, 0.5)},
                       slow: {"lr": 0.25, "betas": None, "eps": 6.0}}, group_lr={slow: 7.0})
        np.testing.assert_allclose(a.read("exp_avg"), np.full(3, 0.25 * 2), rtol=1e-6)
        np.testing.assert_allclose(a.read("exp_avg_sq"), np.full(3, 0.5 * 4), rtol=1e-6)
        np.testing.assert_allclose(a.read(), np.full(3, 1 - 0.01 * 0.5 - 0.01), rtol=1e-6)
        np.testing.assert_allclose(b.read(), np.full(5, 1 - 0.25 * 2 / (2 + 6.0)), rtol=1e-6)
        gradients_of_2(e, (a, b))
        e.step()  # with the groups' own again
        np.testing.assert_allclose(b.read("exp_avg"), np.full(5, (0.9 * 0.1 + 0.1) * 2), rtol=1e-6)


def test_settings_that_cannot_be_meant():
    nan = float("nan")
    with open_engine() as other, open_engine(stage=1) as e:
        foreign = other.group(lr=1.0)
        for settings, why in (({"lr": nan}, "param group: lr is NaN"), ({"betas": (0.9, nan)}, "beta2 is NaN"),
                              ({"eps": np.float32(nan)}, "eps is NaN")):
            with pytest.raises(ValueError, match=why):
                e.group(**settings)
        (a, _), slow = one_param_per_group(e)
        for options, why in (
                ({"lr": nan}, "step: lr is NaN"), ({"max_norm": nan}, "step: max_norm is NaN"),
                ({"group_lr": {slow: nan}}, "learning rate of group 1 is NaN"),
                ({"groups": {slow: {"weight_decay": nan}}}, "settings of group 1: weight_decay is NaN"),
                ({"groups": {None: {"beta": 1}}}, "group 0: there is no setting 'beta', did you mean betas"),
                ({"groups": {None: {"betas": (0.9,)}}}, "betas are two numbers, not 1"),
                ({"groups": {foreign: {"lr": 1.0}}}, "group 1 of another engine"),
                ({"groups": {slow: {"betas": (1.5, 0.9)}}}, "group 1"), ({"lr": -1.0}, "lr")):
            with pytest.raises(strata.InvalidArgument, match=why) as error:
                e.step(**options)
            assert isinstance(error.value, ValueError)
        with pytest.raises(TypeError, match="step: lr must be a number, not '0.1'"):
            e.step(lr="0.1")
        np.testing.assert_array_equal(a.read(), np.ones(3))
        e.step()


def test_dropped_gradients():
    with open_engine(stage=1) as e:
        (a, _), _ = one_param_per_group(e)
        e.drop_gradients()
        with pytest.raises(strata.FailedPrecondition, match="0 of 1 micro-batches"):
            e.step()
        a.grad(np.full(3, 5, np.float32))
        e.end_backward()
        np.testing.assert_array_equal(a.read("grad"), np.full(3, 5))
        e.step()


def test_write_takes_the_roots_value():
    def work(rank):
        with open_engine(stage=3, thread_rank=rank) as e:
            p = e.unit("u").param("w", (3, 5))
            e.commit()
            p.write(np.arange(15, dtype=np.float32).reshape(3, 5) if e.rank == 1 else None, root=1)
            return p.read()

    for result in strata.run_threads(2, work):
        np.testing.assert_array_equal(result, np.arange(15).reshape(3, 5))


# ---- views -----------------------------------------------------------------------------------------------------------


def test_views_are_read_only_and_end_with_the_release():
    with open_engine(stage=3) as e:
        unit, params = register(e)
        with pytest.raises(strata.FailedPrecondition, match='"w" is not fetched'):
            params["w"].view()
        with e.fetch(unit):
            view = params["w"].view()
            row, scalar, empty = view[3], params["scale"].view(), params["empty"].view()
            assert view.shape == (37, 65) and scalar.shape == () and empty.shape == (0, 3)
            np.testing.assert_array_equal(view, initial("w"))
            kept, picked, product = view.copy(), view[[1, 2]], view @ np.ones((65, 2), np.float32)
            assert type(product) is np.ndarray
            with pytest.raises(ValueError, match="read-only"):
                view[0, 0] = 1
        for use in (lambda: view + 1, lambda: np.ones((1, 37)) @ view, lambda: view[0], lambda: row.T[0],
                    lambda: view.sum(), lambda: np.concatenate([np.zeros((1, 65)), view]), lambda: np.dot(view.T, view),
                    lambda: str(view), lambda: view.copy(), lambda: view.astype(np.float64), lambda: list(row),
                    lambda: float(scalar), params["w"].view, params["w"].float32):
            with pytest.raises(strata.FailedPrecondition):
                use()
        np.testing.assert_array_equal(kept + 0, initial("w"))
        np.testing.assert_array_equal(picked + 0, initial("w")[[1, 2]])
        with e.fetch(unit):  # a later fetch may reuse the memory: the old view stays ended
            with pytest.raises(strata.FailedPrecondition, match="view ended"):
                view[0]


def test_fetch_nests_and_close_ends_views():
    e = open_engine(stage=3)
    unit, params = register(e)
    outer = e.fetch(unit)
    view = params["w"].view()
    with e.fetch(unit):
        pass
    assert view[0, 0] == initial("w")[0, 0]
    outer.release()
    with pytest.raises(strata.FailedPrecondition, match="released already"):
        outer.release()
    last = e.fetch(unit)
    view = params["w"].view()
    e.close()
    e.close()
    with pytest.raises(strata.FailedPrecondition, match="view ended"):
        view + 1
    with pytest.raises(strata.FailedPrecondition, match="closed"):
        last.release()
