# %% [markdown]
# # Steady a run
#
# A regression with a few mislabelled, far-away targets and a loss with a large power: it learns, and then single batches throw it back.
# %%
import os
import tempfile

import torch
from matplotlib import pyplot as plt

import gradrein

torch.manual_seed(0)
x = torch.randn(512, 8)
y = x[:, :1] + 0.1 * torch.randn(512, 1)
y[::64] += 8.0  # eight targets are far off


def train(clip=None, record="run.jsonl"):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    test = []
    with gradrein.Monitor(model, optimizer, record=record, clip=clip) as monitor:
        for step in range(400):
            rows = torch.randint(512, (16,))
            optimizer.zero_grad()
            (model(x[rows]) - y[rows]).abs().pow(3).mean().backward()
            optimizer.step()
            if step % 8 == 7:
                clean = torch.randn(256, 8)
                with torch.no_grad():
                    test.append((model(clean) - clean[:, :1]).square().mean().item())
    return test, monitor


os.chdir(tempfile.mkdtemp())  # for the records
before, monitor = train()
for finding in monitor.findings():
    print(finding)
# %% [markdown]
# The findings say what was seen, with numbers. The advice is one threshold, and why:
# %%
advice = monitor.advice()
print(advice.because)
print("max_norm:", advice.threshold)
# %% [markdown]
# The same run with a policy that finds its own limit. Nothing else is changed, and the seed is the same.
# %%
after, _ = train(clip="auto", record="clipped.jsonl")

figure, axes = plt.subplots(figsize=(7, 3))
axes.semilogy(before, label="as it was")
axes.semilogy(after, label="clip='auto'")
axes.set_xlabel("every eighth step")
axes.set_ylabel("test loss")
axes.legend()
print(f"last five test losses: {sum(before[-5:]) / 5:.3f} before, {sum(after[-5:]) / 5:.3f} after")
