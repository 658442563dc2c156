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
        assert max(real) == sum(p.numel() for p in model.blocks[0].parameters())
        assert all(bool((value == 0.25).all()) for value in engine.state_dict().values())
        small_gpt.loop(model, engine, 2)


class Scaled(nn.Linear):
    """Its reset_parameters, nn.Linear's, knows nothing of `scale`."""

    def __init__(self):
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(4))


def refused(make, match, **options):
    """Every rank's error, of two. Models are built before: torch keeps the hooks of all threads in one dict."""
    with strata.torch.init():
        models = [make(), make()]

    def work(rank):
        with pytest.raises(strata.InvalidArgument, match=match):
            small_gpt.prepare(models[rank.rank], thread_rank=rank, **options)

    strata.run_threads(2, work)


def test_what_no_initialisation_fills_is_refused_by_name_on_all_ranks():
    refused(lambda: nn.Sequential(nn.Linear(4, 4), Scaled()),
            'param "1.scale" of a Scaled has no first value.*reset_parameters left it as it was on rank 0')


def prepared_once(model, **options):
    with strata.torch.prepare(model, text=small_gpt.text(), **options) as engine:
        return engine.state_dict()


def test_init_weights_may_leave_the_rest_to_the_layers():
    def fill(module):
        if isinstance(module, Scaled):
            nn.init.ones_(module.scale)

    with strata.torch.init():
        model = nn.Sequential(nn.Linear(4, 4), Scaled())
    state = prepared_once(model, init_weights=fill)
    assert bool((state["1.scale"] == 1).all()) and all(0 < state[f"{i}.weight"].abs().max() <= 0.5 for i in (0, 1))


def test_an_exception_in_init_weights_ends_all_ranks():
    models = [built(), built()]

    def work(rank):
        try:
            strata.torch.prepare(models[rank.rank], text=small_gpt.text(), thread_rank=rank,
                                 init_weights=lambda module: 1 / 0)
        except (ZeroDivisionError, strata.InvalidArgument) as error:
            return type(error)

    assert strata.run_threads(2, work) == [ZeroDivisionError, strata.InvalidArgument]


@pytest.mark.parametrize("units", [None, ["Model"]])
def test_a_tied_param_is_filled_by_whichever_module_can(units):
    class Table(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            linear = nn.Linear(4, 4)
            self.first, self.linear, self.last = Table(linear.weight), linear, nn.Linear(4, 4)
            self.last.weight = linear.weight  # and a bias of its own, filled when the weight is the engine's already

    with strata.torch.init():
        model = Model()
    state = prepared_once(model, units=units, unit_size=1)
    assert state["first.weight"] is state["last.weight"]
    assert all(0 < value.abs().max() <= 0.5 for value in state.values())


def test_a_module_may_fill_those_in_it():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), Scaled()

        def reset_parameters(self):
            nn.init.constant_(self.a.weight, 3)
            nn.init.constant_(self.b.scale, 2)

    with strata.torch.init():
        model = nn.ModuleList([Pair(), Pair()])
    state = prepared_once(model)
    for i in (0, 1):
        assert bool((state[f"{i}.a.weight"] == 3).all() and (state[f"{i}.b.scale"] == 2).all())
        assert state[f"{i}.b.weight"].abs().max() <= 0.5


def test_buffers_on_the_meta_device_are_refused_by_name():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(strata.InvalidArgument, match='buffer "1.running_mean" is on the meta device.*torch.init()'):
        small_gpt.prepare(model)


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


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
PIXELS = {"image_size": 32, "patch_size": 16}


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.ones(32))


class GateThatResets(Gate):
    def reset_parameters(self):
        nn.init.ones_(self.g)


def llama_with(gate):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=61, **SIZES))
    model.model.layers[0].gate = gate()
    return model


def test_what_a_hugging_face_model_does_not_fill():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    refused(lambda: llama_with(Gate), 'param "model.layers.0.gate.g" of a Gate has no first value.*_init_weights of')
    refused(lambda: transformers.CLIPModel(transformers.CLIPConfig(
        text_config={"vocab_size": 61, **SIZES}, vision_config={**PIXELS, **SIZES}, projection_dim=16)),
            'param "logit_scale" of a CLIPModel has no first value')
    with strata.torch.init():
        model = llama_with(GateThatResets)
    assert bool((prepared_once(model)["model.layers.0.gate.g"] == 1).all())


def test_models_inside_models_fill_themselves():
    """The text model's _init_weights has no case for the class embedding of the vision model."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    with strata.torch.init():
        model = nn.Sequential(transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(vocab_size=61, **SIZES),
            vision_config=transformers.CLIPVisionConfig(**PIXELS, **SIZES))))
    state = prepared_once(model)
    assert any(name.endswith("class_embedding") for name in state)
    assert all(bool(value.isfinite().all()) for value in state.values())
