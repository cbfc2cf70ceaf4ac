# %% [markdown]
# # Find mislabelled samples
#
# A sample with a wrong label pulls against all others: its gradient is long, and points elsewhere.
# %%
import torch
import torch.nn.functional as F
from matplotlib import pyplot as plt

import gradrein

torch.manual_seed(0)
x = torch.randn(400, 8)
y = (x[:, 0] > 0).long()
wrong = torch.randperm(400)[:12]
y[wrong] = 1 - y[wrong]

model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(40):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
# %% [markdown]
# One call for the norm of each sample's gradient and its angle to the mean. The model is an ordinary model.
# %%
losses = F.cross_entropy(model(x), y, reduction="none")
ps = gradrein.per_sample(losses, model)
norms, cosine = ps.norms(), ps.cosine()

is_wrong = torch.zeros(400, dtype=torch.bool)
is_wrong[wrong] = True
figure, axes = plt.subplots(figsize=(6, 3.5))
axes.scatter(norms[~is_wrong], cosine[~is_wrong], s=12, label="right label")
axes.scatter(norms[is_wrong], cosine[is_wrong], s=30, marker="x", label="wrong label")
axes.set_xscale("log")
axes.set_xlabel("norm of the sample's gradient")
axes.set_ylabel("cosine to the mean gradient")
_ = axes.legend()
# %%
suspects = norms.topk(20).indices
found = len(set(suspects.tolist()) & set(wrong.tolist()))
print(f"{found} of 12 wrong labels are among the 20 longest gradients")
