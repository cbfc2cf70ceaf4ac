"""Find the samples that pull hardest: here, the ones with a wrong label.

python examples/outliers.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import gradrein


def main():
    torch.manual_seed(0)
    x = torch.randn(400, 8)
    y = (x[:, 0] > 0).long()
    wrong = torch.randperm(400)[:12]
    y[wrong] = 1 - y[wrong]
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    ps = gradrein.per_sample(F.cross_entropy(model(x), y, reduction="none"), model)
    norms, toward_mean = ps.norms(), ps.cosine()
    suspects = norms.topk(20).indices
    found = len(set(suspects.tolist()) & set(wrong.tolist()))
    print(f"median norm {norms.median():.3f}, largest {norms.max():.3f}")
    print(f"{found} of 12 wrong labels are among the 20 largest gradients")
    print(
        f"mean cosine to the mean gradient: all {toward_mean.mean():.2f}, suspects {toward_mean[suspects].mean():.2f}"
    )
    assert found >= 9


if __name__ == "__main__":
    main()
