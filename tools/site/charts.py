"""Draw the charts of the benchmark page from benchmarks/results: python tools/site/charts.py."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[2]
RESULTS, CHARTS = ROOT / "benchmarks" / "results", ROOT / "docs" / "charts"
plt.rcParams.update({"svg.hashsalt": "bridle", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
MODELS = {"mlp": "MLP 256", "cnn": "CNN 64", "resnet": "ResNet-18 32", "gpt": "GPT 16", "lstm": "LSTM 32"}
OURS, THEIRS = "#3f51b5", "#b0b7c6"


def rows(name: str) -> list[dict[str, object]]:
    """Return the rows of a result file; none if it was not measured."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def save(figure: plt.Figure, name: str) -> None:
    """Write a chart without the date, so that the same numbers give the same file."""
    CHARTS.mkdir(exist_ok=True)
    figure.savefig(CHARTS / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def per_sample_methods() -> None:
    """One panel for each model: the whole clipped step over a plain step, every method that ran."""
    found = {title: rows(f"persample-{model}") for model, title in MODELS.items()}
    found = {title: lines for title, lines in found.items() if lines}
    figure, panels = plt.subplots(1, len(found), figsize=(2.6 * len(found), 3.2), layout="constrained")
    for panel, (title, lines) in zip(panels, found.items(), strict=True):
        clipped = [r for r in lines if "gradient_error" in r and isinstance(r["clock"], dict)]
        names = [str(r["method"]) for r in clipped]
        values = [r["clock"]["median"] for r in clipped]
        colors = [OURS if name.startswith("bridle") else THEIRS for name in names]
        bars = panel.barh(names, values, color=colors)
        panel.bar_label(bars, [f" {value:.3g}" for value in values])
        panel.axvline(1, color="black", linewidth=0.8)
        panel.set_xscale("log")
        panel.set_xlim(0.5, 3 * max(values))
        panel.xaxis.set_visible(False)
        panel.spines["bottom"].set_visible(False)
        panel.invert_yaxis()
        panel.set_title(title, fontsize=10)
    figure.supxlabel("clipped step / plain step (1 is a step without splitting)", fontsize=10)
    save(figure, "per-sample-methods")


def per_sample_batches() -> None:
    """The ratio to a plain step as the batch grows."""
    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    for model in MODELS:
        lines = [r for r in rows(f"persample-batches-{model}") if r["method"] == "bridle"]
        if lines:
            axes.plot([r["batch"] for r in lines], [r["clock"]["median"] for r in lines], "o-", label=model.upper())
    axes.set_xscale("log", base=2)
    axes.set_xticks([8, 32, 128, 512], ["8", "32", "128", "512"])
    axes.set_xlabel("batch")
    axes.set_ylabel("clipped step / plain step")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.legend(frameon=False)
    save(figure, "per-sample-batches")


def clip_limit() -> None:
    """Time of clip_grad_norm_ over what reading (and writing) the same memory takes."""
    lines = [r for r in rows("clip") if r["dtype"] == "float32" and r["kind"] == "norm 2" and r["regime"] == "clipping"]
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    places = range(len(lines))
    for shift, name, color in ((-0.2, "torch", THEIRS), (0.2, "bridle", OURS)):
        values = [r["milliseconds"][name] / r["milliseconds"]["limit"] for r in lines]
        bars = axes.bar([p + shift for p in places], values, 0.38, label=name, color=color)
        axes.bar_label(bars, [f"{value:.2g}" for value in values], fontsize=8)
    axes.set_xticks(places, [str(r["model"]) for r in lines], rotation=20, ha="right")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_ylabel("time / memory limit")
    axes.legend(frameon=False)
    save(figure, "clip-limit")


if __name__ == "__main__":
    per_sample_methods()
    per_sample_batches()
    clip_limit()
