"""Private training: clip every sample's gradient, add noise, count what it costs.

    python examples/dp_sgd.py

The privacy spent is counted by `dp-accounting` where it is installed (pip install dp-accounting).
"""

import torch
import torch.nn.functional as F
from torch import nn

import gradrein

SAMPLES, EXPECTED_BATCH, STEPS = 600, 60, 60
MAX_NORM, NOISE = 1.0, 1.1


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 10, generator=generator)
    return x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()


def train(x, y):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(STEPS):
        # Each sample takes part with the same probability: this is what the accountant counts with.
        chosen = torch.rand(SAMPLES) < EXPECTED_BATCH / SAMPLES
        losses = F.cross_entropy(model(x[chosen]), y[chosen], reduction="none")
        ps = gradrein.per_sample(losses, model)
        if step == 0:
            ps.audit()  # nothing missed, every sample got its own
        ps.clip_(MAX_NORM, noise_multiplier=NOISE, divide_by=EXPECTED_BATCH)
        optimizer.step()
        optimizer.zero_grad()
    return model


def spent(delta=1e-3):
    try:
        import dp_accounting
    except ImportError:
        return "unknown: pip install dp-accounting to count it"
    sampled = dp_accounting.PoissonSampledDpEvent(EXPECTED_BATCH / SAMPLES, dp_accounting.GaussianDpEvent(NOISE))
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.SelfComposedDpEvent(sampled, STEPS))
    return f"epsilon {accountant.get_epsilon(delta):.2f} at delta {delta}"


def main():
    x, y = data()
    model = train(x, y)
    right = (model(x).argmax(1) == y).double().mean()
    print(f"sensitivity of the summed gradient: {MAX_NORM}")
    print(f"accuracy {right:.2f}, privacy spent: {spent()}")
    assert right > 0.6


if __name__ == "__main__":
    main()
