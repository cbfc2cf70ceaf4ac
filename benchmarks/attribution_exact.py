"""Projected inner products against the Gram matrix over 200 seeds, and the parameters that projections cover.

For every pair of eight samples: how far the mean over seeds lies from the exact product, in standard errors, and the
variance relative to that of the theory. With 2,000 seeds again, since the variance of a single pair is known to a third
only from 200. Sparse: (|g|²|h|² + <g,h>² - 2 Σ g²h²) / size. Factored: that of P'GQ with independent signs, by its
fourth moments, for each weight, and the sparse one for what is left.

    python benchmarks/attribution_exact.py            # writes benchmarks/results/attribution-exact.json
"""

from __future__ import annotations

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
import torch.nn.functional as F
import transformers
from torch import nn

import gradrein
from persample_models import lstm, resnet
from side_by_side import save

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def of_transformers(model):
    ids = torch.randint(64, (4, 12))

    def losses():
        logits = model(input_ids=ids).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)

    return model, losses


def of_problem(problem):
    return problem.model, lambda: problem.losses(problem.model(problem.x), problem.y)


ARCHITECTURES = {
    "GPT-2": lambda: of_transformers(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0
            )
        )
    ),
    "Llama": lambda: of_transformers(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, intermediate_size=48))
    ),
    "Mixtral": lambda: of_transformers(
        transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**SMALL, intermediate_size=48, num_local_experts=4, num_key_value_heads=2)
        )
    ),
    "ResNet with group norm": lambda: of_problem(resnet(4)),
    "LSTM": lambda: of_problem(lstm(4)),
}


def quadratic(s):
    """The variance of a quadratic form of signs."""
    s = (s + s.T) / 2
    return 2 * (s.square().sum() - s.diagonal().square().sum())


def factored_variance(a, b, k):
    """The variance of <P'AQ, P'BQ> / k² with k columns of signs, for sides that are longer than k."""
    m, n = a.shape
    left, right = m > k, n > k
    if not left and not right:
        return 0.0
    if not right:
        return float(quadratic(a @ b.T) / k)
    if not left:
        return float(quadratic(a.T @ b) / k)
    # Given Q the variance is that of a quadratic form with A W B', W = QQ'/k; its mean over Q by the moments of W.
    outer = float(quadratic(a.T @ b) / k)
    # E |sym(A W B')|² without its diagonal, where E W_ab W_cd = d_ab d_cd + (d_ac d_bd + d_ad d_bc - 2 d_abcd) / k
    mean = a @ b.T
    inner = float(quadratic(mean))
    sums = [(i, j) for i in range(m) for j in range(m) if i != j]
    for i, j in sums:
        s = (torch.outer(a[i], b[j]) + torch.outer(a[j], b[i])) / 2
        s = (s + s.T) / 2
        inner += 2 * float(2 * (s.square().sum() - s.diagonal().square().sum()) / k)
    return outer + inner / k


def sparse_variance(g, h, size):
    return float((g.square().sum() * h.square().sum() + (g @ h) ** 2 - 2 * (g.square() @ h.square())) / size)


def exact(kind, size, seeds):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(20, 12), nn.Flatten(), nn.Linear(48, 24), nn.LayerNorm(24), nn.Tanh(), nn.Linear(24, 3)
    )
    x, y = torch.randint(20, (8, 4)), torch.randint(3, (8,))
    ps = gradrein.per_sample(F.cross_entropy(model(x), y, reduction="none"), model)
    exact_products = ps.gram().double()
    grads = {name: g.double() for name, g in ps.grads().items()}
    found = []
    for seed in range(seeds):
        z = ps.project(size, kind=kind, seed=seed).double()
        found.append(z @ z.T)
    found = torch.stack(found)
    off = (found.mean(0) - exact_products) / (found.std(0) / seeds**0.5)
    pairs = [(i, j) for i in range(8) for j in range(i + 1)]
    ratios = []
    for i, j in pairs:
        if kind == "sparse":
            g, h = (torch.cat([x[n].flatten() for x in grads.values()]) for n in (i, j))
            theory = sparse_variance(g, h, size)
        else:
            weights = [x for x in grads.values() if x.dim() > 2]
            rest = [torch.cat([x[n].flatten() for x in grads.values() if x.dim() == 2]) for n in (i, j)]
            theory = sum(factored_variance(w[i], w[j], size) for w in weights) + sparse_variance(*rest, size * size)
        ratios.append(float(found[:, i, j].var()) / theory)
    ratios = torch.tensor(ratios)
    z_scores = torch.stack([off[i, j] for i, j in pairs]).abs()
    return {
        "kind": kind,
        "size": size,
        "seeds": seeds,
        "pairs": len(pairs),
        "mean_off_in_standard_errors": {
            "rms": round(float(z_scores.square().mean().sqrt()), 3),
            "max": round(float(z_scores.max()), 2),
        },
        "variance_over_theory": {"mean": round(float(ratios.mean()), 3), "max": round(float(ratios.max()), 3)},
    }


def covered(name):
    torch.manual_seed(0)
    model, losses = ARCHITECTURES[name]()
    trainable = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    ps = gradrein.per_sample(losses(), model)
    row = {"model": name, "parameters": sum(trainable.values())}
    for kind, size in (("sparse", 256), ("factored", 4)):
        z = ps.project(size, kind=kind)
        # Each parameter is projected alone by setting the scales of all others to zero: it counts if that is not zero,
        # or its gradient is.
        count = 0
        norms = ps.norms(per_parameter=True)
        for one, numbers in trainable.items():
            scales = {n: torch.full_like(p, float(n == one)) for n, p in model.named_parameters() if p.requires_grad}
            alone = ps.project(size, kind=kind, scales=scales)
            count += numbers * (bool(alone.any()) or not norms[one].any())
        row[kind] = {"columns": z.shape[1], "covered": count, "share": count / row["parameters"]}
    return row


if __name__ == "__main__":
    rows = [exact(kind, size, seeds) for seeds in (200, 2000) for kind, size in (("sparse", 64), ("factored", 4))]
    for row in rows:
        print(row)
    for name in ARCHITECTURES:
        rows.append(covered(name))
        print(rows[-1])
    save("attribution-exact", __doc__, rows)
