"""Models that never exist whole: params on the meta device, filled unit by unit, or from safetensors files."""
import gc
import weakref

import pytest
import torch
from torch import nn

import small_gpt
import strata
import strata.torch


def built(**options):
    with strata.torch.init():
        return small_gpt.make(**options)


def test_params_go_to_meta_and_buffers_stay():
    alive = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            shared = nn.Parameter(torch.ones(3))
            alive.append(weakref.ref(shared))
            self.a, self.b = shared, shared
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
            self.register_buffer("mask", torch.arange(3.0))
            self.linear = nn.Linear(4, 4)
            self.alias = self.linear.weight

    with strata.torch.init():
        model = Model()
    assert all(p.is_meta and type(p) is nn.Parameter for p in model.parameters())
    assert model.a is model.b and model.alias is model.linear.weight and not model.frozen.requires_grad
    assert torch.equal(model.mask, torch.arange(3.0)) and not model.mask.is_meta
    gc.collect()
    assert alive[0]() is None  # no real param is kept
    assert not nn.Linear(2, 2).weight.is_meta
    with pytest.raises(strata.InvalidArgument, match='param "a" is on the meta device and Model has no reset_param'):
        small_gpt.prepare(model)


@pytest.mark.parametrize("stage", [0, 3])
def test_filled_by_the_layers_and_rank_0_wins(stage):
    def work(rank):
        model = built(tied=True)
        before = dict(model.named_parameters())
        with small_gpt.prepare(model, stage, thread_rank=rank) as engine:
            assert all(p is before[name] for name, p in model.named_parameters())  # the objects are the same
            assert model.head.weight is model.tokens.weight
            state = engine.state_dict()
            return state, small_gpt.loop(model, engine, 3)

    (state, losses), (other, others) = strata.run_threads(2, work)
    assert losses == others and all(torch.equal(value, other[name]) for name, value in state.items())
    assert list(state) == list(small_gpt.make(tied=True).state_dict())
    assert bool((state["norm.weight"] == 1).all() and (state["blocks.0.norm1.bias"] == 0).all())
    assert state["blocks.1.mlp.0.weight"].abs().max() <= small_gpt.WIDTH**-0.5 and state["tokens.weight"].std() > 0.8


def test_only_one_unit_is_real_at_a_time():
    model, real = built(), []

    def fill(module):
        real.append(sum(p.numel() for p in model.parameters() if not p.is_meta and
                        not isinstance(p, strata.torch.ReleasedParameter)))
        for p in module.parameters(recurse=False):
            nn.init.constant_(p, 0.25)

    with strata.torch.prepare(model, text=small_gpt.text(), init_weights=fill) as engine:
        assert max(real) <= max(p.numel() for p in model.parameters()) + 4 * small_gpt.WIDTH  # one layer's
        assert all(bool((value == 0.25).all()) for value in engine.state_dict().values())
        small_gpt.loop(model, engine, 2)


def test_from_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    state = small_gpt.make(seed=4).state_dict()
    names = list(state)
    for i, part in enumerate((names[:9], names[9:])):
        safetensors.save_file({name: state[name] for name in part}, tmp_path / f"{i}.safetensors")
    safetensors.save_file({**state, "more": torch.ones(1)}, tmp_path / "more")
    safetensors.save_file({name: state[name] for name in names[1:]}, tmp_path / "less")

    def prepared(rank, weights):
        return strata.torch.prepare(built(), text=small_gpt.text(), thread_rank=rank, weights=weights)

    def work(rank):
        with prepared(rank, tmp_path) as engine:
            return engine.state_dict()

    for found in strata.run_threads(2, work):
        assert all(torch.equal(found[name], state[name]) for name in names)
    with prepared(None, state) as engine:
        assert torch.equal(engine.read("head.weight"), state["head.weight"])
        engine.core.export_weights(tmp_path / "own.safetensors")  # which has fillers between the params
    with prepared(None, tmp_path / "own.safetensors") as engine:
        assert all(torch.equal(engine.state_dict()[name], state[name]) for name in names)
    for wrong, text in (("more", r"unexpected \['more'\]"), ("less", r"missing \['tokens.weight'\]")):
        with pytest.raises(strata.InvalidArgument, match=text):
            prepared(None, tmp_path / wrong)
    with pytest.raises(strata.NotFound, match="no safetensors file"):
        prepared(None, tmp_path / "nowhere")


def test_a_hugging_face_model_fills_itself():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                      num_attention_heads=4, initializer_range=0.5)
    with strata.torch.init():
        model = transformers.LlamaForCausalLM(config)
    assert all(p.is_meta for p in model.parameters()) and not model.model.rotary_emb.inv_freq.is_meta
    with small_gpt.prepare(model) as engine:
        state = engine.state_dict()
        for name, value in state.items():
            assert bool((value == 1).all()) if "norm" in name else 0.4 < value.std() < 0.6, name
        ids = torch.arange(12).view(1, 12)
        engine.backward(model(input_ids=ids, labels=ids).loss)
        engine.step()
