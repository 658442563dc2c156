"""Tensor parallelism under strata.torch: prepare reads Megatron's attributes, and what ranks of one data-parallel group
share stays theirs. Ranks are threads."""
import pytest
import torch
from torch import nn

import strata
import strata.deepspeed
import strata.torch

ROWS, COLS, STEPS = 48, 16, 3
MANIFEST = """
train_micro_batch_size_per_gpu = 1
gradient_clipping = 0.05
deadline_seconds = 60
log_level = "error"
[optimizer.params]
lr = 0.01
[zero_optimization]
stage = 2
"""


class Part(nn.Module):
    """A slice of a matrix's rows, and a vector that all ranks have. Their losses add up to the whole's."""

    def __init__(self, rank, size):
        super().__init__()
        rows = torch.arange(ROWS * COLS).reshape(ROWS, COLS).sin() / 10
        self.weight = nn.Parameter(rows.chunk(size)[rank].clone())
        self.scale = nn.Parameter(torch.linspace(-0.1, 0.1, COLS))
        self.weight.tensor_model_parallel = True

    def forward(self, x):
        return (x @ self.weight.T).square().sum() + (x * self.scale).square().sum()


def train(thread_rank, tensor):
    rank = thread_rank.rank
    model = Part(rank % tensor, tensor)
    with strata.torch.prepare(model, text=MANIFEST, overrides=[f"tensor_model_parallel_size={tensor}"],
                              thread_rank=thread_rank) as engine:
        ranks = engine.core.ranks
        assert (ranks.tensor_model_parallel_rank, ranks.tensor_model_parallel_size) == (rank % tensor, tensor)
        norms = []
        for step in range(STEPS):
            x = torch.arange(COLS) + ranks.data_parallel_rank + step
            engine.backward(model(x.float().cos()))
            engine.step()
            norms.append(engine.core.info().grad_norm)
        return norms, engine.read(model.weight), engine.read(model.scale)


@pytest.mark.parametrize("data", [1, 2])
def test_a_split_model_trains_like_the_whole_one(data):
    whole = strata.run_threads(data, lambda rank: train(rank, 1))
    split = strata.run_threads(2 * data, lambda rank: train(rank, 2))
    for norms, weight, scale in split:
        assert norms == split[0][0] and norms == pytest.approx(whole[0][0], rel=1e-6)
        torch.testing.assert_close(scale, whole[0][2])
    torch.testing.assert_close(torch.cat([split[0][1], split[1][1]]), whole[0][1])


def test_attributes_survive_a_model_without_memory():
    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            param = nn.Parameter(torch.zeros(4, 4))
            param.tensor_model_parallel = True
            self.weight = param

    with strata.torch.init():
        assert Made().weight.is_meta and Made().weight.tensor_model_parallel


def test_deepspeeds_keys_are_the_manifests():
    manifest = strata.deepspeed.read({"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2})
    assert "tensor_model_parallel_size = 4\n" in manifest.text and "pipeline_model_parallel_size = 2\n" in manifest.text
    assert {key.status for key in manifest.keys if "parallel" in key.path} == {"honoured"}
