"""torch.compile of blocks, of the model and around it: the numbers of eager PyTorch, and the same fetches.

Most tests take the backend aot_eager, which has all of torch.compile that touches parameters, hooks and saved tensors,
and no code generation; one test takes inductor. Ranks are processes: torch.compile in several threads of one process
crashes in plain PyTorch, too.
"""
import shutil

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import small_gpt
import strata
import strata.torch
from comparisons import gap
from torch_ranks import TorchJob, on_gpus

UNITS, EMBEDDINGS = 6, 2  # of small_gpt with two layers
STEPS = 3
IS_2_4 = torch.__version__.startswith("2.4.")
CHECKPOINTING = ["reentrant", pytest.param("nonreentrant", marks=pytest.mark.skipif(
    IS_2_4, reason="torch 2.4 cannot compile a block inside checkpoint(use_reentrant=False), without Strata too"))]


@pytest.fixture(autouse=True)
def nothing_compiled_yet():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def held(engine):
    return [unit.name for unit in engine._weights.units if unit.fetched]


def wrap_blocks(model, **how):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, **how)
    return model


def compile_blocks(model, **how):
    for block in model.blocks:
        block.compile(**how)
    return model


def compile_model(model, **how):
    model.compile(**how)
    return model


def wrap_model(model, **how):
    return torch.compile(model, **how)


WAYS = [wrap_blocks, compile_blocks, compile_model, wrap_model]


def train(way, when, stage=3, checkpointing=None, extra=(), **how):
    """Losses, after looking at fetches and at what saved tensors keep."""
    model = small_gpt.make(layers=2, checkpointing=checkpointing)
    if when == "before":
        model = way(model, **how)
    losses = []
    with small_gpt.prepare(model, stage, extra) as engine:
        if when == "after":
            model = way(model, **how)
        for step in range(STEPS):
            loss = model(*small_gpt.batch(step, device=engine.device))
            assert held(engine) == [] and not any(e.is_read for u in engine._weights.units for e in u.entries)
            engine.backward(loss)
            engine.step()
            assert held(engine) == []
            assert engine.core.counters(last_step=True).fetches == 2 * UNITS - EMBEDDINGS
            losses.append(loss.item())
    return losses


def assert_eager(losses, **options):
    plain, _ = small_gpt.train_plainly(STEPS, layers=2, **options)
    assert gap(losses, plain[0]) < 2e-6


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_compile(way, when):
    counted, compiled = torch._dynamo.utils.counters, set()
    counted.clear()
    watch = torch._dynamo.convert_frame.register_bytecode_hook(lambda code, _: compiled.add(code.co_filename))
    try:
        assert_eager(train(way, when, backend="aot_eager"))
    finally:
        watch.remove()
    assert not any(file.startswith(strata.torch.__path__[0]) for file in compiled), compiled
    assert counted["stats"]["unique_graphs"] > 0  # it was compiled
    if way in (wrap_blocks, compile_blocks):  # all blocks with one graph, whole; torch 2.4 makes one for each
        assert counted["stats"]["unique_graphs"] == (2 if IS_2_4 else 1) and not counted["graph_break"]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_compiled_blocks_under_checkpoint(checkpointing, stage):
    losses = train(compile_blocks, "before", stage, checkpointing, backend="aot_eager")
    assert_eager(losses, checkpointing=checkpointing)


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++")
@pytest.mark.parametrize("checkpointing", [None, CHECKPOINTING[1]])
def test_inductor(checkpointing):
    assert_eager(train(compile_blocks, "before", 3, checkpointing), checkpointing=checkpointing)


@on_gpus(1)
@pytest.mark.parametrize("state", ["none", "cpu"])
def test_inductor_on_a_gpu(state):
    offload = [f'zero_optimization.offload_optimizer.device="{state}"'] if state != "none" else []
    for checkpointing in (None, "nonreentrant"):
        eager, compiled = (train(way, "before", 3, checkpointing, small_gpt.on_cuda(offload))
                           for way in (lambda model: model, compile_blocks))
        assert gap(eager, compiled) < 2e-5


def test_two_ranks_gather_twice(tmp_path):
    with TorchJob(tmp_path, 2, stage=3, steps=STEPS, model={"layers": 2}, compile="aot_eager",
                  extra=["zero_optimization.max_reuse_distance=0"]) as job:
        runs = job.results()
    plain, _ = small_gpt.train_plainly(STEPS, layers=2, world=2)
    for (losses, _, counters), expected in zip(runs, plain):
        assert gap(losses, expected) < 2e-6
        # The first unit of backward is still there from the forward, once the order is known.
        assert counters["gather_calls"] == 2 * UNITS - EMBEDDINGS - 1


def test_a_whole_step_compiled():
    model = small_gpt.make(layers=2)
    with small_gpt.prepare(model) as engine:
        @torch.compile(backend="aot_eager")
        def step(ids, targets):
            loss = model(ids, targets)
            engine.backward(loss)
            engine.step()
            return loss * 1

        assert_eager([step(*small_gpt.batch(i)).item() for i in range(STEPS)])


def test_recompiled_for_other_shapes_and_without_gradients():
    plain, model = small_gpt.make(layers=2), compile_blocks(small_gpt.make(layers=2), backend="aot_eager")
    ids, targets = small_gpt.batch(0)
    with small_gpt.prepare(model, micro=3) as engine:
        for length in (12, 7, 5):
            part = ids[:, :length], targets[:, :length]
            with torch.no_grad():
                assert abs(model(*part).item() - plain(*part).item()) < 2e-6
            engine.backward(model(*part))
            (plain(*part) / 3).backward()
        for name, param in plain.named_parameters():
            torch.testing.assert_close(engine.grad(name), param.grad)


def test_a_compiled_part_that_is_checkpointed_inside_its_unit():
    """Its recomputation begins with params that are released: the reentrant kind can, the other says that it cannot
    (in torch 2.4 it can, with what was compiled before)."""
    class Block(small_gpt.Block):
        use_reentrant = True

        def forward(self, x):
            x = x + self.attention(self.norm1(x))
            return x + checkpoint(self.mlp, self.norm2(x), use_reentrant=self.use_reentrant)

    plain = small_gpt.make(layers=2, block=Block)
    plain(*small_gpt.batch(0)).backward()
    for Block.use_reentrant in (True, False):
        model = small_gpt.make(layers=2, block=Block)
        for block in model.blocks:
            block.mlp.compile(backend="aot_eager")
        with small_gpt.prepare(model) as engine:
            loss = model(*small_gpt.batch(0))
            if not Block.use_reentrant and not IS_2_4:
                with pytest.raises(torch.utils.checkpoint.CheckpointError):
                    engine.backward(loss)
                break
            engine.backward(loss)
            for name, param in plain.named_parameters():
                torch.testing.assert_close(engine.grad(name), param.grad)


# ---- what is refused -------------------------------------------------------------------------------------------------


def inside(model, **how):
    model.blocks[1].mlp.compile(**how)
    return model


def the_forward(model, **how):
    model.blocks[1].forward = torch.compile(model.blocks[1].forward, **how)
    return model


def a_function_around(model, **how):
    return torch.compile(lambda *args: model(*args) * 2, **how)


@pytest.mark.parametrize("when, mode", [("before", "reduce-overhead"), ("after", "max-autotune")])
@pytest.mark.parametrize("way", [*WAYS, inside, the_forward, a_function_around])
def test_cuda_graphs_are_refused_by_name(way, when, mode):
    model = small_gpt.make(layers=2)
    if when == "before" and way is not a_function_around:
        model = way(model, mode=mode)
    with small_gpt.prepare(model) as engine:
        if when == "after" or way is a_function_around:
            model = way(model, mode=mode)
        with pytest.raises(strata.FailedPrecondition,
                           match='(module "blocks|the model|a function around the model).*is compiled with CUDA '
                                 'graphs.*max-autotune-no-cudagraphs'):
            model(*small_gpt.batch(0))
        assert held(engine) == []


def test_released_params_are_refused_in_compiled_code_too():
    model = compile_blocks(small_gpt.make(layers=2), backend="aot_eager")
    with small_gpt.prepare(model):
        @torch.compile(backend="aot_eager")
        def read(x):
            return x @ model.blocks[0].mlp[0].weight.T

        with pytest.raises(Exception, match='param "blocks.0.mlp.0.weight" of unit "blocks.0" is released'):
            read(torch.ones(1, small_gpt.WIDTH))
        with pytest.raises(strata.FailedPrecondition, match=r"inside engine.backward\(loss\) only"):
            model(*small_gpt.batch(0)).backward()
        with pytest.raises(strata.FailedPrecondition, match='unit "blocks.0" is called outside the forward'):
            model.blocks[0](torch.ones(1, 2, small_gpt.WIDTH))
