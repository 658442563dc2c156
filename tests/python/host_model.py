"""A small odd model (a scalar, an empty param) for tests of the Python host, and AdamW in numpy to hold it against."""
import numpy as np

import host_library  # noqa: F401 the library under test
import strata

MANIFEST = """
train_micro_batch_size_per_gpu = 1
gradient_accumulation_steps = {micro}
deadline_seconds = 20
threads = 1
log_level = "warn"
[optimizer]
type = "AdamW"
[optimizer.params]
lr = 0.01
betas = [0.9, 0.99]
eps = 1e-8
weight_decay = 0.1
[zero_optimization]
stage = {stage}
"""
SHAPES = {"w": (37, 65), "b": (65,), "scale": (), "empty": (0, 3)}


def text(stage=0, micro=1):
    return MANIFEST.format(stage=stage, micro=micro)


def open_engine(stage=0, micro=1, extra=(), **kwargs):
    if stage == 3:
        extra = ["zero_optimization.param_persistence_threshold=0", *extra]
    return strata.Engine(text=text(stage, micro), overrides=extra, **kwargs)


def register(engine, dtype="fp32"):
    unit = engine.unit("layer")
    params = {name: unit.param(name, shape, dtype=dtype) for name, shape in SHAPES.items()}
    engine.commit()
    for name, p in params.items():
        p.write(initial(name))
    return unit, params


def wave(name, phase, scale):
    n = int(np.prod(SHAPES[name]))
    return (scale * np.sin(0.37 * np.arange(n) + phase + len(name))).astype(np.float32).reshape(SHAPES[name])


def initial(name):
    return wave(name, 0.5, 0.05)


def gradient(name, step, rank, weight):
    return (0.3 * weight + wave(name, 1.3 * step + 0.7 * rank, 0.02)).astype(np.float32)


class AdamW:
    """The reference: fp64, the mean of all gradients given to it."""

    def __init__(self, w):
        self.w, self.m, self.v, self.t = w.astype(np.float64), np.zeros(w.shape), np.zeros(w.shape), 0

    def step(self, grads, lr, decay=0.1, b1=0.9, b2=0.99, eps=1e-8):
        self.t += 1
        g = np.mean(grads, axis=0, dtype=np.float64)
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g * g
        update = self.m / (1 - b1**self.t) / (np.sqrt(self.v / (1 - b2**self.t)) + eps)
        self.w = self.w * (1 - lr * decay) - lr * update


def train(stage, micro=1, steps=5, thread_rank=None, extra=()):
    """{param: {array: values}} after a few steps."""
    with open_engine(stage, micro, extra, thread_rank=thread_rank) as e:
        unit, params = register(e)
        for step in range(1, steps + 1):
            for part in range(micro):
                with e.fetch(unit):
                    for name, p in params.items():
                        p.grad(gradient(name, step, e.rank + 10 * part, p.view()))
                unit.grads_done()
                e.end_backward()
            e.step(lr=0.01 / step)
            info = e.info()
            assert info.steps == info.applied_steps == step and info.was_applied == 1 and info.grad_norm > 0
        arrays = ("weight", "master", "exp_avg", "exp_avg_sq")
        return {name: {array: p.read(array) for array in arrays} for name, p in params.items()}


def reference(world, micro=1, steps=5):
    models = {name: AdamW(initial(name)) for name in SHAPES}
    for step in range(1, steps + 1):
        for name, m in models.items():
            weight = m.w.astype(np.float32)
            grads = [gradient(name, step, r + 10 * part, weight) for r in range(world) for part in range(micro)]
            m.step(grads, 0.01 / step)
    return models


def assert_trained(result, models):
    """fp32 against fp64 over five steps. Each step rounds a few times at 2^-24 relative, on values below 0.1 with
    updates below 0.01, and sqrt(v) is far above eps: 1e-6 absolute is 100 such roundings, and 1e-4 of one update."""
    for name, m in models.items():
        np.testing.assert_allclose(result[name]["weight"], m.w, rtol=0, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(result[name]["weight"], result[name]["master"])
        np.testing.assert_allclose(result[name]["exp_avg"], m.m, rtol=0, atol=1e-7, err_msg=name)
        np.testing.assert_allclose(result[name]["exp_avg_sq"], m.v, rtol=1e-5, atol=1e-10, err_msg=name)
