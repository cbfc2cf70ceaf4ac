"""From what tasks are drawn: a table of ranges and the numbers of each list.

Tasks of a list have models, losses, optimizers, schedules and print statements that those of the lists before do not
have; from the third on also data of other kinds. All but the last are built on (`held` and `unseen` were judged once
before that). `last` is judged once: its numbers and ranges stand here from before any of it was run. Each of its tasks
has a form of its own, so that they are independent of each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

NUMBERS = {
    "build": range(800),
    "held": range(10_000, 10_300),
    "wide": range(20_000, 20_600),
    "unseen": range(30_000, 30_300),
    "last": range(40_000, 43_000, 10),
}
TO_BUILD_ON = ("build", "held", "wide", "unseen")
LONG_FROM = 600  # tasks to build on with this number or a higher one are long
SEEDS = (0, 1)


@dataclass(frozen=True)
class Ranges:
    """What is drawn from; a value that stands several times is drawn as often."""

    models: dict[str, tuple[str, ...]]  # by the kind of data
    losses: dict[str, tuple[str, ...]]  # by what a model's output means: "values", "classes", ...
    optimizers: dict[str, tuple[float, float, str, dict[str, Any]]]  # learning rate from, to; class, arguments
    schedules: tuple[str, ...]
    batches: tuple[int, ...]  # 0: all of the data
    steps: tuple[int, int]
    samples: tuple[int, int]
    widths: tuple[int, int]
    depths: tuple[int, int]
    activations: tuple[str, ...]
    norms: tuple[str, ...]
    noise: tuple[float, ...]
    outliers: tuple[float, ...]  # share of the targets that are many times too large
    label_errors: tuple[float, ...]
    scales: tuple[float, ...]  # of the targets
    weight_decay: tuple[float, ...]
    prints: tuple[int, int]  # which of the print statements: from, to
    times: tuple[int, ...] = (8, 20, 40)  # how often it prints
    features: tuple[int, int] = (3, 12)
    classes: tuple[int, int] = (2, 8)
    lengths: tuple[int, int] = (4, 7)
    dropouts: tuple[float, ...] = (0.0,)
    starts: tuple[float, ...] = (1.0,)  # what the first weights are multiplied by


_SGD = {"sgd": (3e-3, 3.0, "SGD", {}), "momentum": (1e-3, 1.0, "SGD", {"momentum": 0.9})}
_ADAM = {"adam": (1e-4, 1e-1, "Adam", {}), "adamw": (1e-4, 1e-1, "AdamW", {})}

BUILD = Ranges(
    models={
        "regression": ("mlp", "mlp", "linear"),
        "classes": ("mlp", "mlp", "residual"),
        "sequences": ("rnn", "lstm", "transformer"),
        "images": ("cnn",),
        "text": ("gru", "transformer"),
        "bandit": ("mlp",),
    },
    losses={
        "values": (
            "mse",
            "mse",
            "weighted mse",
            "power 3",
            "weighted power 3",
            "power 4",
            "batch power 2",
            "huber",
            "l1",
        ),
        "classes": ("cross-entropy", "cross-entropy", "weighted cross-entropy", "batch power 2", "focal", "smoothed"),
        "actions": ("reinforce", "reinforce with baseline"),
    },
    optimizers={
        **_SGD,
        **_ADAM,
        "nesterov": (1e-3, 1.0, "SGD", {"momentum": 0.9, "nesterov": True}),
        "rmsprop": (1e-4, 1e-1, "RMSprop", {}),
    },
    schedules=("constant", "constant", "constant", "cosine", "steps", "warm-up"),
    batches=(4, 8, 16, 16, 32, 32, 0),
    steps=(80, 240),
    samples=(48, 256),
    widths=(8, 32),
    depths=(1, 3),
    activations=("relu", "relu", "tanh", "gelu"),
    norms=("none", "none", "none", "layer", "batch"),
    noise=(0.05, 0.1, 0.3, 0.5),
    outliers=(0.0, 0.0, 0.0, 0.02, 0.1),
    label_errors=(0.0, 0.0, 0.1, 0.3),
    scales=(1.0, 1.0, 1.0, 3.0, 10.0),
    weight_decay=(0.0, 0.0, 0.0, 1e-4, 1e-2),
    prints=(0, 24),
)

HELD = Ranges(
    models={
        "regression": ("mlp", "residual", "linear"),
        "classes": ("mlp", "linear", "residual"),
        "sequences": ("gru", "rnn", "convolution"),
        "images": ("cnn", "mlp"),
        "text": ("lstm", "transformer"),
        "bandit": ("mlp", "linear"),
    },
    losses={
        "values": ("mse", "weighted mse", "power 2.5", "weighted power 4", "batch power 1.5", "log-cosh", "quantile"),
        "classes": ("cross-entropy", "weighted cross-entropy", "batch power 3", "focal", "hinge", "squared"),
        "actions": ("reinforce", "reinforce with entropy"),
    },
    optimizers={
        **_SGD,
        **_ADAM,
        "heavy momentum": (3e-4, 0.3, "SGD", {"momentum": 0.97}),
        "nadam": (1e-4, 1e-1, "NAdam", {}),
        "adagrad": (1e-3, 1.0, "Adagrad", {}),
        "adamax": (3e-4, 0.3, "Adamax", {}),
    },
    schedules=("constant", "constant", "linear", "one cycle", "exponential", "restarts"),
    batches=(2, 6, 12, 24, 48, 0),
    steps=(70, 320),
    samples=(40, 320),
    widths=(6, 40),
    depths=(1, 4),
    activations=("relu", "silu", "sigmoid", "leaky"),
    norms=("none", "none", "layer"),
    noise=(0.03, 0.2, 0.7),
    outliers=(0.0, 0.0, 0.01, 0.05, 0.2),
    label_errors=(0.0, 0.05, 0.2, 0.4),
    scales=(0.3, 1.0, 1.0, 5.0, 20.0),
    weight_decay=(0.0, 0.0, 1e-3, 3e-2),
    prints=(24, 40),
)

WIDE = Ranges(
    models={
        "regression": ("deep", "gated", "mlp"),
        "classes": ("deep", "gated", "residual"),
        "sequences": ("gru", "transformer", "convolution"),
        "text": ("rnn", "lstm"),
        "autoencoding": ("mlp", "deep"),
        "imbalanced": ("mlp", "linear"),
        "binary": ("mlp", "gated", "linear"),
        "spread": ("mlp", "residual"),
        "values of actions": ("pairs",),
        "polynomials": ("linear", "mlp"),
        "ratings": ("factors",),
    },
    losses={
        "values": ("mse", "mse", "weighted mse", "power 3", "weighted power 2.5", "relative", "batch power 2", "l1"),
        "classes": ("cross-entropy", "cross-entropy", "weighted focal", "batch power 1.5", "hinge", "sharp"),
        "binary": ("bce", "weighted bce", "rare bce"),
        "spread": ("gaussian",),
        "q": ("td", "td huber"),
    },
    optimizers={
        **_SGD,
        **_ADAM,
        "short adam": (1e-4, 1e-1, "Adam", {"betas": (0.5, 0.9)}),
        "amsgrad": (1e-4, 1e-1, "Adam", {"amsgrad": True}),
        "radam": (1e-4, 1e-1, "RAdam", {}),
        "rmsprop with momentum": (3e-5, 3e-2, "RMSprop", {"momentum": 0.9, "centered": True}),
    },
    schedules=("constant", "constant", "square root", "late drop", "triangles", "warm-up and cosine"),
    batches=(4, 8, 16, 32, 64, 0),
    steps=(60, 400),
    samples=(48, 400),
    widths=(8, 48),
    depths=(1, 3),
    activations=("relu", "gelu", "tanh", "softplus"),
    norms=("none", "none", "layer", "batch"),
    noise=(0.05, 0.2, 0.5),
    outliers=(0.0, 0.0, 0.02, 0.1),
    label_errors=(0.0, 0.1, 0.3),
    scales=(0.5, 1.0, 1.0, 4.0, 15.0),
    weight_decay=(0.0, 0.0, 1e-3, 1e-2),
    prints=(40, 54),
    times=(6, 15, 40),
    features=(3, 16),
    classes=(2, 10),
    lengths=(4, 10),
    dropouts=(0.0, 0.0, 0.0, 0.2),
    starts=(1.0, 1.0, 1.0, 0.3, 2.0),
)

UNSEEN = Ranges(
    models={
        "regression": ("products", "joined", "mlp"),
        "classes": ("products", "joined", "deep"),
        "images": ("cnn", "gated"),
        "text": ("attention", "gru"),
        "bandit": ("gated", "mlp"),
        "series": ("lstm", "attention", "rnn"),
        "heavy tails": ("mlp", "joined", "linear"),
        "parity": ("mlp", "residual"),
        "counts": ("mlp", "linear"),
        "matching": ("pairs",),
        "codes": ("codes",),
        "sets": ("sets",),
    },
    losses={
        "values": ("mse", "mse", "weighted l1", "power 3.5", "weighted power 2", "batch power 2.5", "linex", "cauchy"),
        "classes": ("cross-entropy", "cross-entropy", "weighted smoothed", "raised 2", "brier", "margin"),
        "actions": ("expected", "reinforce"),
        "counts": ("poisson", "weighted poisson"),
        "matching": ("info-nce", "triplet"),
        "codes": ("elbo",),
    },
    optimizers={
        "sgd": (1e-3, 1.0, "SGD", {}),
        "light momentum": (2e-3, 2.0, "SGD", {"momentum": 0.5}),
        "heavy nesterov": (5e-4, 0.5, "SGD", {"momentum": 0.95, "nesterov": True}),
        "adam": (2e-4, 2e-1, "Adam", {}),
        "adam with a long memory": (1e-4, 1e-1, "Adam", {"betas": (0.95, 0.9999)}),
        "adamw with a large epsilon": (3e-4, 3e-1, "AdamW", {"eps": 1e-3}),
        "adadelta": (3e-2, 30.0, "Adadelta", {}),
        "rmsprop with a short memory": (1e-4, 1e-1, "RMSprop", {"alpha": 0.9}),
    },
    schedules=("constant", "constant", "polynomial", "halving", "rising", "trapezoid"),
    batches=(3, 10, 20, 40, 80, 0),
    steps=(65, 450),
    samples=(44, 360),
    widths=(7, 44),
    depths=(1, 4),
    activations=("relu", "elu", "hardtanh", "mish"),
    norms=("none", "none", "layer", "batch"),
    noise=(0.02, 0.15, 0.6),
    outliers=(0.0, 0.0, 0.03, 0.15),
    label_errors=(0.0, 0.05, 0.25),
    scales=(0.7, 1.0, 1.0, 6.0, 12.0),
    weight_decay=(0.0, 0.0, 3e-4, 2e-2),
    prints=(54, 68),
    times=(7, 12, 25, 40),
    features=(4, 14),
    classes=(2, 9),
    lengths=(4, 12),
    dropouts=(0.0, 0.0, 0.4),
    starts=(1.0, 1.0, 0.5, 1.7),
)

LAST = Ranges(
    models={
        "regression": ("highway", "experts", "shared"),
        "classes": ("maxout", "highway", "experts"),
        "series": ("mixer", "gru"),
        "text": ("attention", "rnn"),
        "coordinates": ("mlp", "deep", "highway"),
        "claims": ("mlp", "experts", "linear"),
        "denoising": ("mlp", "shared"),
        "signals": ("mixer", "convolution", "lstm"),
        "copying": ("gru", "lstm", "transformer"),
        "graphs": ("graph",),
        "rankings": ("pairs",),
        "lifetimes": ("mlp", "linear", "maxout"),
        "directions": ("mlp", "residual"),
        "two branches": ("mlp", "highway"),
    },
    losses={
        "values": (
            "mse",
            "mse",
            "summed mse",
            "weighted asymmetric",
            "power 4.5",
            "weighted power 3",
            "batch power 1.2",
            "pseudo-huber",
            "tukey",
        ),
        "classes": (
            "cross-entropy",
            "cross-entropy",
            "weighted modest",
            "poly",
            "generalized",
            "summed cross-entropy",
        ),
        "order": ("bradley-terry", "rank hinge"),
        "lifetimes": ("exponential", "weighted exponential"),
        "directions": ("cosine", "angle"),
        "mixture": ("mixture",),
    },
    optimizers={
        "sgd": (2e-3, 2.0, "SGD", {}),
        "dampened": (3e-3, 3.0, "SGD", {"momentum": 0.9, "dampening": 0.5}),
        "quick nesterov": (1e-3, 1.0, "SGD", {"momentum": 0.7, "nesterov": True}),
        "slow momentum": (2e-4, 0.2, "SGD", {"momentum": 0.99}),
        "adam as for transformers": (1e-4, 1e-1, "Adam", {"betas": (0.9, 0.98), "eps": 1e-9}),
        "adamw as for language": (1e-4, 1e-1, "AdamW", {"betas": (0.9, 0.95)}),
        "adam without momentum": (1e-4, 1e-1, "Adam", {"betas": (0.0, 0.99)}),
        "adagrad from above zero": (3e-3, 3.0, "Adagrad", {"initial_accumulator_value": 0.1}),
        "centered rmsprop": (1e-4, 1e-1, "RMSprop", {"alpha": 0.95, "centered": True}),
    },
    schedules=("constant", "constant", "inverse time", "warm-up and linear", "flat and cosine", "noam"),
    batches=(5, 9, 14, 28, 56, 0),
    steps=(75, 380),
    samples=(50, 340),
    widths=(9, 42),
    depths=(1, 3),
    activations=("relu", "sine", "selu", "hardswish", "softsign"),
    norms=("none", "none", "rms", "layer"),
    noise=(0.04, 0.25, 0.55),
    outliers=(0.0, 0.0, 0.04, 0.12),
    label_errors=(0.0, 0.08, 0.2),
    scales=(0.4, 1.0, 1.0, 3.0, 8.0),
    weight_decay=(0.0, 0.0, 2e-4, 5e-3),
    prints=(68, 94),
    times=(9, 16, 30, 40),
    features=(3, 13),
    classes=(2, 7),
    lengths=(5, 11),
    dropouts=(0.0, 0.0, 0.1, 0.3),
    starts=(1.0, 1.0, 1.0, 0.7, 1.4),
)

# Long enough for a model to memorise what it is trained on, which short runs hardly ever do
LONG = replace(
    BUILD,
    models={"regression": ("mlp",), "classes": ("mlp", "mlp", "residual")},
    steps=(500, 1000),
    samples=(100, 400),
    widths=(24, 64),
    depths=(2, 3),
    batches=(16, 32),
)
RANGES = {"build": BUILD, "held": HELD, "wide": WIDE, "unseen": UNSEEN, "last": LAST}
