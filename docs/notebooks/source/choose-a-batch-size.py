# %% [markdown]
# # Choose a batch size
#
# The gradient noise scale is the number of samples at which noise and signal in the mean gradient are equal. Batches much smaller
# waste steps, batches much larger waste samples. It grows as training goes on.
# %%
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt

import gradrein

torch.manual_seed(0)
teacher = torch.randn(16, 4)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
steps, scales = [], []
for step in range(201):
    x = torch.randn(1024, 16)
    y = (x @ teacher + torch.randn(1024, 4)).argmax(1)
    losses = F.cross_entropy(model(x), y, reduction="none")
    if step % 20 == 0:
        stats = gradrein.per_sample(losses, model).stats()
        steps.append(step)
        scales.append(stats.noise_scale)
    optimizer.zero_grad()
    losses.mean().backward()
    optimizer.step()

figure, axes = plt.subplots(figsize=(6, 3))
axes.semilogy(steps, scales, "o-")
axes.axhline(1024, linestyle="--", color="gray")
axes.set_xlabel("step")
_ = axes.set_ylabel("noise scale (samples)")
# %% [markdown]
# The dashed line is the batch that was used. An estimate from one batch has noise of its own: where the signal is smaller than
# what one batch can show, the scale is infinite and the point is missing.
# %%
for step, scale in zip(steps, scales):
    print(f"step {step:3}: {scale:8.0f} samples")
