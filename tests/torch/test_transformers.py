"""Hugging Face models, unchanged, with random small weights: decoders, encoders, both, and experts."""
import math

import pytest
import torch

import small_gpt
import strata
import strata.torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def seeded(model, config):
    with small_gpt.RANDOM, torch.random.fork_rng():
        torch.manual_seed(1)
        return model(config)


def llama(**options):
    config = transformers.LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
                                      bos_token_id=1, eos_token_id=None, pad_token_id=0, **options)
    return seeded(transformers.LlamaForCausalLM, config)


def bert(**options):
    config = transformers.BertConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                                     num_attention_heads=4, max_position_embeddings=32, hidden_dropout_prob=0.0,
                                     attention_probs_dropout_prob=0.0, **options)
    return seeded(transformers.BertForMaskedLM, config)


def gpt2():
    config = transformers.GPT2Config(vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0,
                                     embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1)
    return seeded(transformers.GPT2LMHeadModel, config)


def t5():
    config = transformers.T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                                   dropout_rate=0.0, decoder_start_token_id=0)
    return seeded(transformers.T5ForConditionalGeneration, config)


def mixtral():
    config = transformers.MixtralConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    return seeded(transformers.MixtralForCausalLM, config)


def loss_of(model, step, rank):
    ids, targets = (rows.contiguous() for rows in small_gpt.batch(step, rank))
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=targets).loss


def losses(make, stage=None, world=1, steps=10, checkpointing=None, **options):
    """Of every rank: through an engine, or plainly when stage is None."""
    def model():
        made = make(**options)
        made.train()
        if checkpointing is not None:
            made.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        return made

    if stage is None:
        plain, found = model(), [[] for _ in range(world)]
        optimizer = small_gpt.MasterAdamW(plain)
        for step in range(steps):
            for rank in range(world):
                loss = loss_of(plain, step, rank)
                loss.backward()
                found[rank].append(loss.item())
            optimizer.step(world)
        return found

    def work(rank):
        mine, found = model(), []
        with small_gpt.prepare(mine, stage, thread_rank=rank) as engine:
            for step in range(steps):
                loss = loss_of(mine, step, engine.rank)
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            gathers = engine.core.counters(last_step=True).gather_calls
            return found, len(engine._weights.units), gathers
    runs = strata.run_threads(world, work)
    assert runs[0][2] <= 2 * runs[0][1]
    return [run[0] for run in runs]


@pytest.mark.parametrize("checkpointing", [None, True, False])
@pytest.mark.parametrize("make,options", [(llama, {}), (llama, {"tie_word_embeddings": True}), (bert, {}), (gpt2, {}),
                                          (t5, {}), (mixtral, {})],
                         ids=["llama", "tied llama", "bert", "gpt2", "t5", "mixtral"])
def test_losses_are_plain_pytorchs(make, options, checkpointing):
    plain = losses(make, world=2, checkpointing=checkpointing, **options)
    ours = losses(make, 3, 2, checkpointing=checkpointing, **options)
    for a, b in zip(plain, ours):
        assert max(abs(x - y) for x, y in zip(a, b)) < 1e-4
        assert a[-1] != a[0] and all(map(math.isfinite, b))
    assert losses(make, 0, 2, checkpointing=checkpointing, **options) == ours


def test_units_of_a_llama():
    names = [unit.name for unit in strata.torch.units.choose(llama())]
    assert names == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "model.norm", "lm_head"]


def test_generate():
    plain = llama().eval()
    prompt = torch.tensor([[1, 5, 9, 13]])
    expected = plain.generate(prompt, max_new_tokens=8, do_sample=False)

    def work(rank):
        model = llama().eval()
        with small_gpt.prepare(model, thread_rank=rank) as engine:
            found = model.generate(prompt, max_new_tokens=8, do_sample=False)
            assert not any(unit.fetched for unit in engine._weights.units)
            return found

    for found in strata.run_threads(2, work):
        assert torch.equal(found, expected)


def test_low_rank_adapters_on_a_frozen_llama():
    """Frozen base weights, checkpointed blocks: what fine-tuning does."""
    class Adapter(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down = torch.nn.Parameter(0.1 * torch.linspace(-1, 1, 2 * base.in_features).view(2, -1))
            self.up = torch.nn.Parameter(torch.zeros(base.out_features, 2))

        def forward(self, x):
            return self.base(x) + x @ self.down.t() @ self.up.t()

    def adapted(**options):
        model = llama(**options)
        model.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
            layer.mlp.down_proj = Adapter(layer.mlp.down_proj)
        model.enable_input_require_grads()
        return model

    for checkpointing in (None, True, False):
        plain = losses(adapted, world=2, checkpointing=checkpointing)
        ours = losses(adapted, 3, 2, checkpointing=checkpointing)
        assert ours == losses(adapted, 1, 2, checkpointing=checkpointing)
        for a, b in zip(plain, ours):
            assert max(abs(x - y) for x, y in zip(a, b)) < 1e-4 and a[-1] < a[0]
