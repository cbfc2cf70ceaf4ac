"""Whether attributions are right: wrong labels found among digits, and TRAK against models that were trained again.

Wrong labels: a tenth of the labels of scikit-learn's digits is wrong; the area under the curve of the outlier list, and
of the losses beside it. Linear datamodeling score: models trained on random halves of 500 digits, the sum of scores
over each half against the mean margin of the models trained on it, by Spearman's rank correlation for each query.
traker's scores come from the same checkpoints with its basic projector and the same size, where it is installed.

    python benchmarks/attribution_quality.py          # writes benchmarks/results/attribution-quality.json
"""

from __future__ import annotations

import copy
import sys
import tempfile
import types
import warnings

import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from torch import nn

import gradrein
from gradrein import attribution
from side_by_side import save

TRAIN, QUERIES, HALVES, CHECKPOINTS, SIZE, EPOCHS = 500, 60, 60, 8, 128, 30


def digits(seed):
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(found.data, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order]


def mlp(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def train(model, x, y, epochs, seed, lr=0.3):
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(y), generator=generator).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    return model


def area(scores, bad):
    ranks = scores.argsort().argsort().double() + 1
    n = bad.sum()
    return float((ranks[bad].sum() - n * (n + 1) / 2) / (n * (~bad).sum()))


def wrong_labels(seed):
    x, y = digits(seed)
    generator = torch.Generator().manual_seed(seed)
    bad = torch.rand(len(y), generator=generator) < 0.1
    y = torch.where(bad, (y + torch.randint(1, 10, y.shape, generator=generator)) % 10, y)
    model, losses = mlp(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        stores = []
        for number in range(3):
            train(model, x, y, 3, seed + 10 * number, lr=0.05)
            each = F.cross_entropy(model(x), y, reduction="none")
            losses = losses + each.detach()
            stores.append(attribution.GradientStore(f"{folder}/{number}"))
            stores[-1].add(range(len(y)), gradrein.per_sample(each, model).project(512))
        scores, ids = attribution.outliers(stores)
    listed = torch.empty(len(y))
    listed[ids] = scores
    return {
        "what": "10% wrong labels of digits",
        "seed": seed,
        "wrong": int(bad.sum()),
        "outliers_auc": round(area(listed, bad), 4),
        "loss_auc": round(area(losses, bad), 4),
    }


def of_margins(model, x, y):
    return gradrein.per_sample(attribution.margins(model(x), y), model).project(SIZE, seed=0)


def ours(models, x, y, queries, labels):
    with tempfile.TemporaryDirectory() as folder:
        stores = [attribution.GradientStore(f"{folder}/{i}") for i in range(len(models))]
        for store, model in zip(stores, models, strict=True):
            store.add(range(len(y)), of_margins(model, x, y))
        residuals = torch.stack([torch.sigmoid(-attribution.margins(model(x), y).detach()) for model in models])
        asked = [of_margins(model, queries, labels) for model in models]
        scores, ids = attribution.trak(stores, asked, residuals)
    out = torch.empty_like(scores)
    out[:, ids] = scores
    return out


def trakers(models, x, y, queries, labels):
    """The scores of traker, with its projector for the CPU."""
    if "fast_jl" not in sys.modules:
        sys.modules["fast_jl"] = types.ModuleType("fast_jl")  # its CUDA kernel, which is asked for and not used
    from trak import TRAKer
    from trak.projectors import BasicProjector, ProjectionType

    models = copy.deepcopy(models)
    states = [copy.deepcopy(model.state_dict()) for model in models]  # it loads each into the first model
    numbers = sum(p.numel() for p in models[0].parameters())
    projector = BasicProjector(numbers, SIZE, 0, ProjectionType.rademacher, "cpu", block_size=64)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traker = TRAKer(
            models[0], "image_classification", len(y), save_dir=folder, device="cpu", projector=projector,
            proj_dim=SIZE, use_half_precision=False, logging_level=40,
        )  # fmt: skip
        for number, state in enumerate(states):
            traker.load_checkpoint(state, model_id=number)
            traker.featurize(batch=[x, y], num_samples=len(y))
        traker.finalize_features()
        for number, state in enumerate(states):
            traker.start_scoring_checkpoint("queries", state, number, num_targets=len(labels))
            traker.score(batch=[queries, labels], num_samples=len(labels))
        return torch.tensor(traker.finalize_scores("queries")).T


def linear_datamodeling_score(scores, halves, outputs):
    """The mean over queries of the rank correlation of predicted with true outputs over halves."""
    predicted = scores.double() @ halves.double().T  # (queries, halves)
    return float(torch.tensor([spearmanr(p, t).statistic for p, t in zip(predicted, outputs.T, strict=True)]).mean())


def trained_again():
    x, y = digits(0)
    queries, labels = x[TRAIN : TRAIN + QUERIES], y[TRAIN : TRAIN + QUERIES]
    x, y = x[:TRAIN], y[:TRAIN]
    generator = torch.Generator().manual_seed(0)
    halves = torch.stack([torch.randperm(TRAIN, generator=generator) < TRAIN // 2 for _ in range(HALVES)])
    outputs = []
    for number, half in enumerate(halves):
        both = [train(mlp(100 + 7 * number + i), x[half], y[half], EPOCHS, number + i) for i in range(2)]
        outputs.append(sum(attribution.margins(model(queries), labels).detach() for model in both) / 2)
    outputs = torch.stack(outputs)  # (halves, queries)
    models = []
    for number in range(CHECKPOINTS):
        half = torch.randperm(TRAIN, generator=generator) < TRAIN // 2
        models.append(train(mlp(number), x[half], y[half], EPOCHS, number))
    row = {
        "what": "linear datamodeling score of TRAK",
        "retrainings": 2 * HALVES,
        "halves": HALVES,
        "checkpoints": CHECKPOINTS,
        "size": SIZE,
        "queries": QUERIES,
        "ours": round(linear_datamodeling_score(ours(models, x, y, queries, labels), halves, outputs), 4),
        "ours_one_checkpoint": round(
            linear_datamodeling_score(ours(models[:1], x, y, queries, labels), halves, outputs), 4
        ),
    }
    try:
        row["traker"] = round(linear_datamodeling_score(trakers(models, x, y, queries, labels), halves, outputs), 4)
        row["traker_one_checkpoint"] = round(
            linear_datamodeling_score(trakers(models[:1], x, y, queries, labels), halves, outputs), 4
        )
    except ImportError as error:
        row["traker"] = f"not installed: {error}"
    return row


if __name__ == "__main__":
    rows = [wrong_labels(seed) for seed in range(3)]
    for row in rows:
        print(row)
    rows.append(trained_again())
    print(rows[-1])
    save("attribution-quality", __doc__, rows)
