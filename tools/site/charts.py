"""Draw the charts of the benchmark page from benchmarks/results: python tools/site/charts.py."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # last: its names are those of others, too
matplotlib.use("Agg")
from matplotlib import pyplot as plt

from page import SHORT as MODELS
from page import read_results

ROOT = Path(__file__).parents[2]
RESULTS, CHARTS = ROOT / "benchmarks" / "results", ROOT / "docs" / "charts"
plt.rcParams.update({"svg.hashsalt": "gradrein", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
OURS, THEIRS = "#3f51b5", "#b0b7c6"
PERSAMPLE = "python benchmarks/persample.py"
PEERS = {
    "torch.func": "#e07b00",
    "ExpandedWeights": "#2e8b3d",
    "Opacus hooks": "#c62828",
    "Opacus ghost": "#8e44ad",
    "BackPACK": "#00838f",
    "JAX": "#795548",
}


def rows(name: str) -> list[dict[str, object]]:
    """Return the rows of a result file; none if it was not measured."""
    path = RESULTS / f"{name}.json"
    return read_results(path)["rows"] if path.exists() else []


def left_out(chart: str, found: object, command: str) -> bool:
    """Return whether there is nothing to draw, and say what measures it."""
    if not found:
        print(f"{chart} is left out: nothing was measured. {command}")
    return not found


def save(figure: plt.Figure, name: str) -> None:
    """Write a chart without the date, so that the same numbers give the same file."""
    CHARTS.mkdir(exist_ok=True)
    figure.savefig(CHARTS / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def grid(count: int) -> tuple[plt.Figure, list[plt.Axes]]:
    """Return a figure with so many panels, three in a row."""
    height = -(-count // 3)
    figure, panels = plt.subplots(height, 3, figsize=(8.4, 0.6 + 2.4 * height), layout="constrained", squeeze=False)
    for panel in panels.flat[count:]:
        panel.set_axis_off()
    return figure, list(panels.flat[:count])


def per_sample_methods() -> None:
    """One panel for each model: the whole clipped step over a plain step, every method that ran."""
    found = {title: rows(f"persample-{model}") for model, title in MODELS.items()}
    found = {title: lines for title, lines in found.items() if lines}
    if left_out("per-sample-methods", found, PERSAMPLE):
        return
    figure, panels = grid(len(found))
    for panel, (title, lines) in zip(panels, found.items(), strict=True):
        clipped = [r for r in lines if "gradient_error" in r and isinstance(r["clock"], dict)]
        names = [label(str(r["method"])) for r in clipped]
        values = [r["clock"]["median"] for r in clipped]
        colors = [OURS if str(r["method"]).startswith("gradrein") else THEIRS for r in clipped]
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
    """One panel for each model: clipped step over plain step as the batch grows, every method that was measured."""
    found = {model: [r for r in rows(f"persample-batches-{model}") if "gradient_error" in r] for model in MODELS}
    found = {model: lines for model, lines in found.items() if lines}
    alone = [model for model, lines in found.items() if not {r["method"] for r in lines} & set(PEERS)]
    if alone:
        methods = " ".join(f'"{method}"' for method in ("plain", "gradrein", *PEERS))
        print(f"per-sample-batches shows no peers: {PERSAMPLE} --batches {' '.join(alone)} --methods {methods}")
    if left_out("per-sample-batches", found, f"{PERSAMPLE} --batches"):
        return
    figure, panels = grid(len(found))
    for panel, (model, lines) in zip(panels, found.items(), strict=True):
        for method in dict.fromkeys(str(r["method"]) for r in lines):
            points = [(r["batch"], r["clock"]["median"]) for r in lines if r["method"] == method]
            panel.plot(*zip(*points, strict=True), label=label(method), **look(method))
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_xscale("log", base=2)
        batches = sorted({r["batch"] for r in lines})
        panel.set_xticks(batches, [str(batch) for batch in batches])
        ratios(panel, [r["clock"]["median"] for r in lines])
        panel.set_title(model.upper(), fontsize=10)
        panel.set_xlabel("batch")
    figure.supylabel("clipped step / plain step", fontsize=10)
    named = {label: line for panel in panels for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), frameon=False, loc="outside lower center", ncols=4)
    save(figure, "per-sample-batches")


def label(method: str) -> str:
    """Return what a method is called in the table of the page."""
    return "compiled" if method == "gradrein fastest" else method


def look(method: str) -> dict[str, object]:
    """Return the colour and line of a method, the same in every panel."""
    if method.startswith("gradrein"):
        return {"color": OURS, "marker": "o", "linewidth": 2, "linestyle": "-" if method == "gradrein" else "--"}
    return {"color": PEERS.get(method, "#697086"), "marker": ".", "linewidth": 1.3}


def ratios(axes: plt.Axes, values: list[float]) -> None:
    """Scale an axis of ratios: by logarithm where they span more than a factor of four."""
    if max(values) > 4 * min(values):
        axes.set_yscale("log")
        ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200) if tick < 2 * max(values)]
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()


def clip_limit() -> None:
    """Time of clip_grad_norm_ over what reading (and writing) the same memory takes."""
    lines = [r for r in rows("clip") if r["dtype"] == "float32" and r["kind"] == "norm 2" and r["regime"] == "clipping"]
    if left_out("clip-limit", lines, "python benchmarks/clip.py"):
        return
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    places = range(len(lines))
    for shift, name, color in ((-0.2, "torch", THEIRS), (0.2, "gradrein", OURS)):
        values = [r["milliseconds"][name] / r["milliseconds"]["limit"] for r in lines]
        bars = axes.bar([p + shift for p in places], values, 0.38, label=name, color=color)
        axes.bar_label(bars, [f"{value:.2f}" if value < 10 else f"{value:.0f}" for value in values], fontsize=8)
    axes.set_xticks(places, [str(r["model"]) for r in lines], rotation=20, ha="right")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
    axes.minorticks_off()
    axes.set_ylabel("time / memory limit")
    axes.legend(frameon=False)
    save(figure, "clip-limit")


if __name__ == "__main__":
    per_sample_methods()
    per_sample_batches()
    clip_limit()
