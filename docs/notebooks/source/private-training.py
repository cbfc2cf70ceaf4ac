# %% [markdown]
# # Private training with accounting
#
# Clip each sample's gradient, add noise in units of the clipping norm, and count what was spent.
# %%
import torch
import torch.nn.functional as F

import gradrein

SAMPLES, EXPECTED, STEPS, NORM, NOISE = 600, 60, 60, 1.0, 1.1
torch.manual_seed(0)
x = torch.randn(SAMPLES, 10)
y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()
model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

for step in range(STEPS):
    chosen = torch.rand(SAMPLES) < EXPECTED / SAMPLES  # Poisson sampling, which the accountant counts with
    losses = F.cross_entropy(model(x[chosen]), y[chosen], reduction="none")
    ps = gradrein.per_sample(losses, model)
    if step == 0:
        ps.audit()  # the sum of what was split is what autograd gives
    optimizer.zero_grad()
    ps.clip_(NORM, noise_multiplier=NOISE, divide_by=EXPECTED)
    optimizer.step()
print(f"accuracy {(model(x).argmax(1) == y).double().mean():.2f}")
# %% [markdown]
# One sample more or less changes the sum of clipped gradients by at most `NORM`. That is the sensitivity; the accountant needs the
# sampling rate, the noise in that unit, and the number of steps.
# %%
import dp_accounting

event = dp_accounting.PoissonSampledDpEvent(EXPECTED / SAMPLES, dp_accounting.GaussianDpEvent(NOISE))
accountant = dp_accounting.rdp.RdpAccountant()
accountant.compose(dp_accounting.SelfComposedDpEvent(event, STEPS))
print(f"epsilon {accountant.get_epsilon(1e-3):.2f} at delta 0.001")
