"""The model that every system trains: a GPT in plain PyTorch with checkpointed blocks. Nothing in it knows of them."""
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        width, self.heads = size.width, size.heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, width)
        x = x + self.proj(y)
        return x + self.fc2(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Gives the loss."""

    def __init__(self, size):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.h = nn.ModuleList([Block(size) for _ in range(size.layers)])
        self.lnf, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, x, y):
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.h:
            h = checkpoint(block, h, use_reentrant=False)
        return F.cross_entropy(self.head(self.lnf(h)).flatten(0, 1).float(), y.flatten())


def make(size, device):
    """The same fp32 values for every system on every rank."""
    torch.manual_seed(1)
    with torch.device(device):
        return GPT(size)


def batch(size, rows, device):
    """(tokens, targets), random, the same in every micro-batch, step and rank."""
    torch.manual_seed(0)
    return [torch.randint(0, size.vocabulary, (rows, size.length), device=device) for _ in range(2)]
