"""A released parameter has its metadata and no readable data: never a small tensor, never values (record 05)."""
import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import small_gpt
import strata
import strata.torch

NAME = 'param "blocks.0.mlp.0.weight" of unit "blocks.0"'


@pytest.fixture(scope="module", params=[0, 3])
def prepared(request):
    model = small_gpt.make()
    with small_gpt.prepare(model, request.param) as engine:
        yield model, engine


@pytest.fixture
def p(prepared):
    return prepared[0].blocks[0].mlp[0].weight


X = torch.ones(2, small_gpt.WIDTH)

READS = {
    "add": lambda p: p + 1, "radd": lambda p: X[0, 0] + p, "matmul": lambda p: X @ p.T, "sum": lambda p: p.sum(),
    "linear": lambda p: F.linear(X, p), "index": lambda p: p[0], "iterate": list, "item": lambda p: p.item(),
    "tolist": lambda p: p.tolist(), "numpy": lambda p: p.numpy(), "float": float, "bool": bool,
    "data": lambda p: p.data, "set data": lambda p: setattr(p, "data", X), "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(), "data_ptr": lambda p: p.data_ptr(), "storage": lambda p: p.untyped_storage(),
    "stride": lambda p: p.stride(), "cpu": lambda p: p.cpu(), "to": lambda p: p.to(torch.float64),
    "view": lambda p: p.view(-1), "norm": lambda p: torch.linalg.norm(p), "stack": lambda p: torch.stack([X, p]),
    "out": lambda p: torch.add(X, 1, out=p), "in place": lambda p: p.add_(1), "fill": lambda p: nn.init.zeros_(p),
    "freeze": lambda p: p.requires_grad_(False), "set frozen": lambda p: setattr(p, "requires_grad", False),
    "deepcopy": copy.deepcopy, "pickle": pickle.dumps, "torch.save": lambda p: torch.save(p, io.BytesIO()),
    "dlpack": lambda p: p.__dlpack__(), "share": lambda p: p.share_memory_(),
    "equal": lambda p: torch.equal(p, p), "grad of it": lambda p: torch.autograd.grad(p.sum(), p),
}


@pytest.mark.parametrize("read", READS)
def test_every_way_to_the_data_is_refused_by_name(p, read):
    with pytest.raises(strata.FailedPrecondition, match=NAME):
        READS[read](p)


WRITES = {"mul_": lambda p: p.mul_(2), "normal_": nn.init.normal_, "copy_": lambda p: p.copy_(p),
          "set data": lambda p: setattr(p, "data", X), "set item": lambda p: p.__setitem__(0, 1.0)}


@pytest.mark.parametrize("write", WRITES)
def test_what_writes_is_told_how_to(p, write):
    with torch.no_grad(), pytest.raises(strata.FailedPrecondition, match=NAME + r".*engine.write\(param, value\)"):
        WRITES[write](p)


def test_metadata_is_the_logical_one(p):
    assert isinstance(p, nn.Parameter) and isinstance(p, strata.torch.ReleasedParameter)
    assert p.shape == (4 * small_gpt.WIDTH, small_gpt.WIDTH) == tuple(p.size()) and p.size(0) == len(p) == p.shape[0]
    assert p.numel() == p.nelement() == torch.numel(p) == 4 * small_gpt.WIDTH**2 and p.dim() == p.ndim == 2
    assert p.dtype == torch.float32 and p.element_size() == p.itemsize == 4 and p.nbytes == 4 * p.numel()
    assert p.device == torch.device("cpu") and p.layout is torch.strided and not p.is_cuda and not p.is_meta
    assert p.requires_grad and p.is_leaf and p.grad is None and p.grad_fn is None
    assert p.is_floating_point() and torch.is_floating_point(p) and not p.is_complex()
    assert NAME in repr(p) and "released" in repr(p) and f"{p}" == f"{p!s}" == repr(p) and len(f"{p:300}") == 300
    assert {p: 1}[p] == 1 and p in {p}


def test_behind_it_lies_nan_of_the_whole_shape(p):
    """What C++ that gets round the class reads."""
    with torch._C.DisableTorchFunctionSubclass():
        assert p.untyped_storage().nbytes() == 4 and p.stride() == (0, 0)
        assert p.shape == (4 * small_gpt.WIDTH, small_gpt.WIDTH) and math.isnan(p.sum().item())
        assert bool(torch.isnan(p.detach()).all())


def test_the_model_around_it(prepared):
    model, engine = prepared
    for what in (model.state_dict, model.half, lambda: model.to(torch.float64), lambda: model.requires_grad_(False),
                 lambda: nn.utils.parameters_to_vector(model.parameters())):
        with pytest.raises(strata.FailedPrecondition, match='param "tokens.weight" of unit "tokens"'):
            what()
    for what in (model.half, model.float, model.bfloat16, model.cpu, model.cuda, lambda: model.to("cuda"),
                 lambda: model.blocks[1].to(torch.float16), lambda: model.type(torch.float64)):
        with pytest.raises(strata.FailedPrecondition, match="is the engine's since prepare.*plugins.device says"):
            what()
    for what in (lambda: copy.deepcopy(model), lambda: torch.save(model, io.BytesIO())):
        with pytest.raises(strata.FailedPrecondition, match="cannot be copied or pickled"):
            what()
    for part in (model, model.blocks[0]):
        with pytest.raises(strata.FailedPrecondition, match="^model.load_state_dict: .* engine.load_state_dict"):
            part.load_state_dict(engine.state_dict())
    with pytest.raises(strata.FailedPrecondition, match="plugins.device"):
        engine.to("cuda")
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in small_gpt.make().parameters())
    model.zero_grad()
    model.train()
    model.eval()
    torch.optim.SGD(model.parameters(), lr=1)  # may hold them; its step is refused
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0  # it sees no gradients


def test_the_same_object_before_in_and_after_the_forward():
    model = small_gpt.make()
    before = dict(model.named_parameters())
    inside = {}
    model.blocks[1].norm1.register_forward_hook(lambda *_: inside.update(model.blocks[1].named_parameters()))
    with small_gpt.prepare(model) as engine:
        with torch.no_grad():
            model(*small_gpt.batch(0))
        for name, p in inside.items():
            assert p is before["blocks.1." + name]
        with engine.gathered(model.blocks[1]):
            assert type(model.blocks[1].norm1.weight) is nn.Parameter
            assert bool((model.blocks[1].norm1.weight == 1).all())
            with pytest.raises(strata.FailedPrecondition, match='unit "blocks.0"'):
                model.blocks[0].norm1.weight + 1
        with engine.gathered():
            assert all(type(p) is nn.Parameter for p in model.parameters())
        assert all(isinstance(p, strata.torch.ReleasedParameter) for p in model.parameters())
    assert all(p is before[name] for name, p in model.named_parameters())


def test_used_outside_its_unit():
    """A parent that reads a child's weight without calling the child, in a unit of its own."""
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x):
            return F.linear(x, self.layers[0].weight)

    model = Parent()
    with small_gpt.prepare(model):
        with pytest.raises(strata.FailedPrecondition, match='param "layers.0.weight" of unit "layers.0" is released'):
            model(torch.ones(1, 4))
    model = Parent()
    with small_gpt.prepare(model, units="Parent"):
        assert model(torch.ones(1, 4)).shape == (1, 4)
