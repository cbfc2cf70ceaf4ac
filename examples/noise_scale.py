"""How large a batch would pay? The gradient noise scale, from one batch, as training goes on.

python examples/noise_scale.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import gradrein


def main():
    torch.manual_seed(0)
    teacher = torch.randn(16, 4)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scales = []
    for step in range(151):
        x = torch.randn(256, 16)
        y = (x @ teacher + torch.randn(256, 4)).argmax(1)
        losses = F.cross_entropy(model(x), y, reduction="none")
        if step % 50 == 0:
            stats = gradrein.per_sample(losses, model).stats()
            scales.append(stats.noise_scale)
            print(
                f"step {step:3}: loss {losses.mean():.3f}  noise scale {stats.noise_scale:8.1f} samples  "
                f"alignment {stats.alignment:.2f}"
            )
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("early steps need small batches, late ones large ones")
    assert scales[0] < scales[-1]


if __name__ == "__main__":
    main()
