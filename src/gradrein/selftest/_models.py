"""Small models of the kinds people train, and one loss for each sample."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A block of a transformer with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then apply the layers, each added to what came in."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A language model over positions that are learned."""

    def __init__(self, width: int = 32, layers: int = 2, vocabulary: int = 50, length: int = 12) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, 4) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits with the classes second, as cross-entropy takes them."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.blocks(x)).transpose(1, 2)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM whose last step is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Rows are sent to one of two experts by an index."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        weights, chosen = self.router(x).softmax(1).max(1)
        out = x.new_zeros(len(x), 4)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


def mlp(width: int = 32) -> nn.Module:
    """Return three linear layers."""
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def cnn() -> nn.Module:
    """Return convolutions with a group norm, and a batch norm in eval mode."""
    norm = nn.BatchNorm2d(8).eval()
    first = [nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), norm, nn.ReLU()]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(32, 4))


MODELS = {"MLP": mlp, "CNN": cnn, "GPT": GPT, "LSTM": Recurrent, "experts": Experts}
_SHAPES = {"MLP": (8,), "CNN": (3, 7, 7), "LSTM": (5, 6), "experts": (8,)}


def batch(name: str, samples: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets for a model, on the CPU."""
    if name == "GPT":
        return torch.randint(50, (samples, 12)), torch.randint(50, (samples, 12))
    return torch.randn(samples, *_SHAPES[name]), torch.randint(4, (samples,))


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return one loss for each sample."""
    each = F.cross_entropy(model(x), y, reduction="none")
    return each.flatten(1).mean(1) if each.dim() > 1 else each
