"""Train on noisy labels by giving each sample a weight made from its own gradient.

    python examples/noisy_labels.py

A sample whose gradient points away from that of a small clean set is left out.
"""

import torch
import torch.nn.functional as F
from torch import nn

import gradrein


def data(count, generator):
    x = torch.randn(count, 10, generator=generator)
    return x, (x[:, 0] + 0.5 * x[:, 1] > 0).long()


def train(reweigh):
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x, y = data(300, generator)
    flipped = torch.rand(300, generator=generator) < 0.4
    y = torch.where(flipped, 1 - y, y)
    clean_x, clean_y = data(40, generator)
    test_x, test_y = data(2000, generator)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(150):
        losses = F.cross_entropy(model(x), y, reduction="none")
        if reweigh:
            clean = torch.autograd.grad(F.cross_entropy(model(clean_x), clean_y), list(model.parameters()))
            direction = dict(zip(dict(model.named_parameters()), clean, strict=True))
            ps = gradrein.per_sample(losses, model)
            weights = ps.dot(direction).clamp(min=0)
            ps.weighted_(weights / weights.sum().clamp(min=1e-12))
        else:
            losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return float((model(test_x).argmax(1) == test_y).double().mean())


def main():
    plain, weighted = train(reweigh=False), train(reweigh=True)
    print(f"test accuracy with 40% of the labels wrong: plain {plain:.3f}, re-weighted {weighted:.3f}")
    assert weighted > plain


if __name__ == "__main__":
    main()
