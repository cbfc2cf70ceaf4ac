"""Private training within a budget: batches in parts, a kill on the way, and what was spent.

    python examples/dp_sgd.py

Needs dp-accounting: pip install 'gradrein[private]'.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradrein import private

EPOCHS = 6


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 10, generator=generator)
    return x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()


def make(x, y):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = DataLoader(TensorDataset(x, y), batch_size=60)
    budget = {"epsilon": 3.0, "delta": 1e-3, "epochs": EPOCHS, "accountant": "rdp"}
    run = private.Private(model, optimizer, loader, max_norm=1.0, max_physical_batch=16, seed=0, **budget)
    return model, optimizer, run


def train(model, run, most):
    """Take steps until there are so many."""
    while run.steps < most:
        for x, y in run.loader:
            taken = run.step(F.cross_entropy(model(x), y, reduction="none"))
            if taken and run.steps == most:
                break


def main():
    x, y = data()
    model, optimizer, run = make(x, y)
    train(model, run, 25)
    saved = [thing.state_dict() for thing in (model, optimizer, run)]

    model, optimizer, run = make(x, y)  # as after a kill: a new process begins here
    for thing, state in zip((model, optimizer, run), saved, strict=True):
        thing.load_state_dict(state)
    train(model, run, EPOCHS * len(x) // 60)

    right = (model(x).argmax(1) == y).double().mean()
    print(
        f"accuracy {right:.2f}, noise multiplier {run.noise_multiplier:.2f}, epsilon {run.epsilon():.2f} at delta 0.001"
    )
    assert right > 0.6
    assert run.epsilon() <= 3.0


if __name__ == "__main__":
    main()
