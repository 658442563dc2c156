"""Which modules become units, and what prepare refuses."""
import collections

import pytest
import torch
from torch import nn

import small_gpt
import strata
import strata.torch
from strata.torch import units as rules


def names(model, units=None, unit_size=rules.UNIT_SIZE):
    return {unit.name: list(unit.params) for unit in rules.choose(model, units, unit_size)}


def test_blocks_and_the_rest():
    chosen = names(small_gpt.make(tied=True))
    assert list(chosen) == ["tokens", "positions", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]
    assert len(chosen["blocks.1"]) == 12 and chosen["blocks.1"][0] == "blocks.1.norm1.weight"
    assert chosen["tokens"] == ["tokens.weight"] and chosen["head"] == ["head.weight"]  # tied: both need it


def test_by_class_and_by_function():
    model = small_gpt.make()
    by_name = names(model, ["Attention", nn.LayerNorm])
    assert by_name["blocks.0.attention"] == [f"blocks.0.attention.{n}" for n in ("qkv.weight", "qkv.bias", "out.weight",
                                                                              "out.bias")]
    assert "blocks.2.norm2" in by_name and "blocks.0.mlp" in by_name and "blocks.0" not in by_name
    inner = names(model, ["Block", "Attention"])  # a unit inside a unit
    assert len(inner["blocks.0"]) == 8 and len(inner["blocks.0.attention"]) == 4
    assert names(model, lambda name, module: name == "blocks.1")["blocks.1"]
    for wrong, text in ((["Blok"], "no module of class Blok; its classes: Attention, Block"),
                        (lambda *_: False, "chose no module"), ("ModuleList", "never called itself")):
        with pytest.raises(strata.InvalidArgument, match=text):
            names(model, wrong)


def test_by_size():
    model = nn.Sequential(collections.OrderedDict(
        a=nn.Linear(10, 10), b=nn.Sequential(nn.Linear(10, 40), nn.Linear(40, 10)), c=nn.LayerNorm(10)))
    assert list(names(model)) == [""]
    assert list(names(model, unit_size=900)) == ["a", "b", "c"]
    assert list(names(model, unit_size=500)) == ["a", "b.0", "b.1", "c"]
    assert list(names(model, unit_size=1)) == ["a", "b.0", "b.1", "c"]  # a single layer is not divided


def test_params_of_lists_belong_to_the_module_around():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.extra = nn.ParameterList([torch.ones(2), torch.ones(2)])
            self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])

    assert names(Model()) == {"": ["scale", "extra.0", "extra.1"], "layers.0": ["layers.0.weight", "layers.0.bias"],
                              "layers.1": ["layers.1.weight", "layers.1.bias"]}


def test_every_param_is_in_a_unit():
    for units in (None, "Block", "LayerNorm", ["Block", "Linear"], lambda n, m: isinstance(m, nn.Embedding)):
        for size in (10**9, 5000, 1):
            model = small_gpt.make(tied=True)
            found = {id(p) for unit in rules.choose(model, units, size) for p in unit.params.values()}
            assert found == {id(p) for p in model.parameters()}


def test_prepare_refuses():
    def refused(text, model=None, change=lambda model: None, **options):
        model = model or small_gpt.make()
        change(model)
        with pytest.raises(strata.InvalidArgument, match=text):
            small_gpt.prepare(model, **options)

    refused('param "tokens.weight" is torch.float64', change=lambda m: m.double())
    refused("has a gradient already", change=lambda m: m(*small_gpt.batch(0)).backward())
    refused("UninitializedParameter", nn.Sequential(nn.LazyLinear(3)))
    refused("has no params", nn.GELU())
    refused(r"groups\[0\] has 'momentum' \(a group has params and lr", groups=[{"params": [], "momentum": 1}])
    refused("no param of the model", groups=[{"params": [nn.Parameter(torch.ones(3))]}])
    model = small_gpt.make()
    refused('param "tokens.weight" is in two groups', model, groups=[{"params": [model.tokens.weight]}] * 2)
    with small_gpt.prepare(model):
        refused("no model twice", model)


def test_a_plan_that_cannot_fit_is_refused_with_the_numbers():
    model = small_gpt.make()
    with pytest.raises(strata.ResourceExhausted, match="host_memory_limit"):
        small_gpt.prepare(model, extra=["host_memory_limit=1000"])
    assert type(model.tokens.weight) is nn.Parameter  # nothing was taken from the model
    with pytest.raises(strata.ResourceExhausted, match='unit "blocks.0" needs [0-9]+ elements'):
        strata.run_threads(2, lambda rank: small_gpt.prepare(small_gpt.make(), thread_rank=rank, extra=[
            "zero_optimization.max_live_parameters=5000"]))
    with small_gpt.prepare(model) as engine:
        small_gpt.loop(model, engine, 1)


@pytest.mark.parametrize("model", [3, [nn.Linear(2, 2)], nn.ParameterList([nn.Parameter(torch.ones(2))])])
def test_what_is_no_module_that_is_called_is_refused(model):
    with pytest.raises(strata.InvalidArgument, match=f"not a {type(model).__name__}"):
        strata.torch.prepare(model, text=small_gpt.text())
