"""From what tasks are drawn: one table of ranges to build on, another, wider one to judge by, and the numbers of each.

Held-out tasks have models, losses, optimizers, schedules and print statements that no task to build on has. Their
numbers stand here from before any of them was run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

NUMBERS = {"build": range(800), "held": range(10_000, 10_300)}
LONG_FROM = 600  # tasks to build on with this number or a higher one are long
SEEDS = (0, 1)


@dataclass(frozen=True)
class Ranges:
    """What is drawn from; a value that stands several times is drawn as often."""

    models: dict[str, tuple[str, ...]]  # by the kind of data
    losses: dict[str, tuple[str, ...]]  # "values", "classes" or "actions", which is what a model's output means
    optimizers: dict[str, tuple[float, float, dict[str, Any]]]  # lowest and highest learning rate, arguments
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


_SGD = {"sgd": (3e-3, 3.0, {}), "momentum": (1e-3, 1.0, {"momentum": 0.9})}
_ADAM = {"adam": (1e-4, 1e-1, {}), "adamw": (1e-4, 1e-1, {})}

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
        "nesterov": (1e-3, 1.0, {"momentum": 0.9, "nesterov": True}),
        "rmsprop": (1e-4, 1e-1, {}),
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
        "heavy momentum": (3e-4, 0.3, {"momentum": 0.97}),
        "nadam": (1e-4, 1e-1, {}),
        "adagrad": (1e-3, 1.0, {}),
        "adamax": (3e-4, 0.3, {}),
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
RANGES = {"build": BUILD, "held": HELD}
