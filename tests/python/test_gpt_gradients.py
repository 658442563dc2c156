"""The sample's loss and gradients against the same model written in PyTorch.

The program gpt_gradients computes them in fp32 for weights given in a file; PyTorch in fp64. Skipped when PyTorch is
not there (Debian: python3-torch) or the program was not built. STRATA_BUILD_DIR names the build directory.
"""
import os
import pathlib
import subprocess
import tempfile
import unittest

import numpy as np

try:
    import torch
except ImportError:
    torch = None

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(os.environ.get("STRATA_BUILD_DIR", ROOT / "build" / "release")) / "bin" / "gpt_gradients"
HEAD_DIM = 64


def params(config):
    """[(name, elements)] in the program's order."""
    lines = subprocess.run([PROGRAM, *map(str, config)], check=True, capture_output=True, text=True).stdout.split("\n")
    return [(name, int(count)) for name, count in (line.split() for line in lines if line)]


def rmsnorm(x, gain):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * gain


def attention(x, qkv, proj):
    batch, context, dim = x.shape
    heads = lambda part: part.view(batch, context, dim // HEAD_DIM, HEAD_DIM).transpose(1, 2)
    q, k, v = (heads(part) for part in (x @ qkv.T).chunk(3, -1))
    scores = (q @ k.transpose(-1, -2)) / HEAD_DIM**0.5
    future = torch.triu(torch.ones(context, context, dtype=torch.bool), diagonal=1)
    mixed = torch.softmax(scores.masked_fill(future, float("-inf")), -1) @ v
    return mixed.transpose(1, 2).reshape(batch, context, dim) @ proj.T


def model_loss(w, layers, inputs, targets):
    x = w["embed.token"][inputs] + w["embed.position"]
    for i in range(layers):
        part = lambda name: w[f"block{i}.{name}"]
        x = x + attention(rmsnorm(x, part("norm1")), part("qkv"), part("proj"))
        hidden = torch.nn.functional.gelu(rmsnorm(x, part("norm2")) @ part("up").T, approximate="tanh")
        x = x + hidden @ part("down").T
    logits = rmsnorm(x, w["head.norm"]) @ w["head.token"].T
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@unittest.skipIf(torch is None, "PyTorch is not installed (Debian: python3-torch)")
@unittest.skipUnless(PROGRAM.exists(), f"{PROGRAM.name} was not built")
class GptGradients(unittest.TestCase):
    def compare(self, layers, dim, context, batch):
        config = (layers, dim, context, batch)
        rng = np.random.default_rng(1)
        shapes = {"token": (256, dim), "position": (context, dim), "norm": (dim,), "norm1": (dim,), "norm2": (dim,),
                  "qkv": (3 * dim, dim), "proj": (dim, dim), "up": (4 * dim, dim), "down": (dim, 4 * dim)}
        names = params(config)
        flat = [rng.normal(0, 0.05, count).astype(np.float32) + ("norm" in name) for name, count in names]
        flat[-1] = flat[0]  # head.token is tied to embed.token
        inputs, targets = rng.integers(0, 256, (2, batch, context), dtype=np.uint8)

        with tempfile.TemporaryDirectory() as folder:
            source, result = pathlib.Path(folder, "in"), pathlib.Path(folder, "out")
            source.write_bytes(b"".join(a.astype(np.float32).tobytes() for a in flat)
                               + inputs.tobytes() + targets.tobytes())
            subprocess.run([PROGRAM, *map(str, config), source, result], check=True)
            data = result.read_bytes()
        loss = np.frombuffer(data[:8], np.float64)[0]
        found = np.frombuffer(data[8:], np.float32)

        weights = {}
        for (name, _), values in zip(names, flat):
            tensor = torch.tensor(values, dtype=torch.float64).view(shapes[name.split(".")[1]])
            weights[name] = tensor.requires_grad_()
        expected = model_loss(weights, layers, torch.tensor(inputs.astype(np.int64)),
                              torch.tensor(targets.astype(np.int64)))
        expected.backward()

        self.assertAlmostEqual(loss, expected.item(), delta=1e-5)
        offset = 0
        for name, count in names:
            ours = found[offset:offset + count].astype(np.float64)
            theirs = weights[name].grad.numpy().ravel()
            error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
            self.assertLess(error, 2e-5, f"{name}: relative error {error:.2e}")
            offset += count
        self.assertEqual(offset, len(found))

    def test_one_layer_one_head(self):
        self.compare(layers=1, dim=64, context=9, batch=1)

    def test_several_layers_heads_and_samples(self):
        self.compare(layers=3, dim=192, context=40, batch=3)


if __name__ == "__main__":
    unittest.main()
