"""Read handwritten digits; rare mistakes are expensive, so classes are weighted and the loss is raised to a power.

An ordinary training script. Its train and test losses swing.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F


def load(seed: int):
    images, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, test = order[:1297], order[1297:]
    return (x[train], y[train]), (x[test], y[test])


def weighted_power_loss(logits, digits, power: float):
    weight = 1 + (digits == 8) * 4.0 + (digits == 9) * 4.0
    return (weight * F.cross_entropy(logits, digits, reduction="none") ** power).mean()


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--epochs", type=int, default=20)
    options.add_argument("--lr", type=float, default=0.025)
    options.add_argument("--power", type=float, default=2.0)
    args = options.parse_args()
    torch.set_num_threads(1)  # the model is small
    torch.manual_seed(args.seed)
    (x, y), (test_x, test_y) = load(args.seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-3)
    for epoch in range(args.epochs):
        losses = []
        for batch in torch.randperm(len(x)).split(32):
            loss = weighted_power_loss(model(x[batch]), y[batch], args.power)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            test = weighted_power_loss(model(test_x), test_y, args.power).item()
        print(f"epoch {epoch:3d}  train {sum(losses) / len(losses):9.4f}  test {test:9.4f}", flush=True)


if __name__ == "__main__":
    main()
