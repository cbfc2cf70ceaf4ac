"""Write what pages say about speed from the JSON files in results/, losses included: python benchmarks/page.py.

`docs/benchmarks.md` in whole; in `README.md` the table between two comments; `docs/index.md` from `README.md`.
A test compares all three with the results.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from steady import COMPARED, mean_and_worst

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results"
ROOT = HERE.parent

BEGIN, END = "<!-- figures: written by benchmarks/page.py -->", "<!-- end of figures -->"

HEAD = """# Benchmarks

Written by `python benchmarks/page.py` from `benchmarks/results/`, where all rows are, with method and machine of
each. All times are of a CPU with two cores; **nothing was measured on a GPU**.

Contenders take turns in one process or, for per-sample steps, in a process of their own; a ratio is taken within each
round. Shown is the median over rounds, with quartiles in brackets. Every ratio is gradrein's time, or the other
library's, over a named baseline: **below 1 is faster than the baseline**. What watching costs is in [watch](watch.md).

## Per-sample clipping

A step is forward, backward and a clipped gradient in `.grad`. It costs a plain step and something; the line at 1 is
the plain step:

![Clipped step over plain step, for each model and method](charts/per-sample-methods.svg)

It costs relatively more the smaller the batch is, because the Python time of a step does not shrink with it:

![Ratio to a plain step against the batch](charts/per-sample-batches.svg)

## Clipping by norm

Against the time that reading and writing the gradients once would take. Large models run at the speed of memory;
thousands of tiny tensors lose a factor of two to Python, where torch loses ten:

![Time of clipping over the memory limit](charts/clip-limit.svg)

## Ratios

"Compiled" is what `gradrein.compile` keeps by itself, which may be the eager step. "Best other" is the fastest other
library that runs the model and gives the same gradient. Batch sizes stand after the model. Clipping is of norm 2 in
float32; under the limit nothing is scaled. The last row of the first two groups is the worst of all batches, and of all
kinds of norm and dtypes.

"""

FAMILIES = """## Model families { #families }

Of `transformers`: hidden 256, four layers, batch 8 x 128; clipped per-sample step over plain step:

"""

LAUNCHES = """## On a device { #launches }

Kernels that a call launches on a simulated CUDA device, and after a comma how often it waits for a value; tiny
models, batch 8, second step (`python benchmarks/launches.py`). Time, bandwidth, asynchrony and the rounding of its
kernels it cannot show.

"""

STEADY = """## Ways to clip, on tasks that swing { #steady }

No timing: the final test loss over that of the best of eight fixed thresholds, chosen in hindsight from these very
runs (below 1 is better than the best threshold). Geometric mean over 20 tasks that swing, then the worst task; two
seeds. `auto` was developed on other tasks; the other ways are those of papers. A run of length 4x is four times as
long. `benchmarks/results/steady.md` has every task. What `gradrein watch` finds and advises is judged on
[random runs](findings.md#the-rule).

"""

# Models and batches, in the order of rows and charts.
SHORT = {
    "mlp": "MLP 256",
    "mlp-8": "MLP 8",
    "cnn": "CNN 64",
    "resnet": "ResNet-18 32",
    "gpt": "GPT 16",
    "gpt-2": "GPT 2",
    "lstm": "LSTM 32",
    "llama": "Llama 16",
    "experts": "Experts 16",
}


@dataclass
class Ratio:
    """A time over that of a baseline, with its quartiles."""

    case: str
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}-{self.high:.2f}]"


Row = tuple[Ratio, Ratio | None, Ratio | None]  # ours, ours compiled, the best other


def read_results(path: pathlib.Path) -> dict[str, Any]:
    """Return results as they were written; those from before the project had its name say `bridle`."""
    return json.loads(path.read_text().replace("bridle", "gradrein"))


def date_of(stem: str) -> str:
    """Return the day of a measurement."""
    return read_results(RESULTS / f"{stem}.json")["environment"]["date"]


def rows_of(stem: str) -> list[dict[str, Any]]:
    """Return the rows of a result file; none if it was not measured."""
    path = RESULTS / f"{stem}.json"
    return read_results(path)["rows"] if path.exists() else []


def ratio(case: str, value: dict[str, float]) -> Ratio:
    """A ratio as it was recorded."""
    return Ratio(case, value["median"], value["low"], value["high"])


def inverse(case: str, value: dict[str, float]) -> Ratio:
    """A ratio that was recorded as "faster by"."""
    return Ratio(case, 1 / value["median"], 1 / value["high"], 1 / value["low"])


@dataclass
class Step:
    """What a clipped per-sample step of one model costs over a plain one."""

    eager: Ratio
    compiled: Ratio | None
    other: Ratio | None

    @property
    def over_other(self) -> float | None:
        """Our eager step over that of the fastest other library."""
        return self.eager.median / self.other.median if self.other else None


def steps() -> list[Step]:
    """Return one entry for each model and batch whose methods were compared."""
    found = []
    for stem, name in SHORT.items():
        when = date_of(f"persample-{stem}")
        name += f", {when}" if when != date_of("persample-mlp") else ""  # the head of the table has that one
        ratios = {r["method"]: ratio(name, r["clock"]) for r in rows_of(f"persample-{stem}") if "gradient_error" in r}
        others = [(r.median, method) for method, r in ratios.items() if not method.startswith("gradrein")]
        best = min(others)[1] if others else None
        other = Ratio(best, *_values(ratios[best])) if best else None
        if "gradrein" in ratios:
            found.append(Step(ratios["gradrein"], ratios.get("gradrein fastest"), other))
    return found


def _values(ratio: Ratio) -> tuple[float, float, float]:
    return ratio.median, ratio.low, ratio.high


def by_batch() -> list[Ratio]:
    """Return our clipped steps over plain ones at all batches that were measured."""
    return [
        ratio(f"{model.upper()} {row['batch']}", row["clock"])
        for model in ("mlp", "cnn", "lstm")
        for row in rows_of(f"persample-batches-{model}")
        if row["method"] == "gradrein" and "clock" in row
    ]


def clipping(*, kinds: tuple[str, ...] = ("norm 2",), dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> list[Ratio]:
    """Return our time of clipping over that of torch's faster way."""
    return [
        inverse(_clip_case(row), row["faster_than_torch_best"])
        for row in rows_of("clip")
        if row["kind"] in kinds and row["dtype"] in dtypes
    ]


def _clip_case(row: dict[str, Any]) -> str:
    model = re.sub(r"^(\d+) x \((\d+), (\d+)\)", r"\1 tensors of \2 x \3", row["model"])
    regime = {"under": "under the limit", "clipping": "clipped"}[row["regime"]]
    parts = [model, "" if row["kind"] == "norm 2" else row["kind"], row["dtype"], regime]
    return ", ".join(part for part in parts if part not in ("", "float32"))


def worst(ratios: list[Ratio]) -> Ratio:
    return max(ratios, key=lambda one: one.median)


def best(ratios: list[Ratio]) -> Ratio:
    return min(ratios, key=lambda one: one.median)


def front() -> str:
    """Return the table of the front page: for each claim the best row for us, and the worst."""
    clips, all_steps = clipping(), steps()
    plain = [*(step.eager for step in all_steps), *by_batch()]
    compared = sorted((step for step in all_steps if step.other), key=lambda step: step.over_other)

    def over_other(step: Step) -> str:
        return f"{step.over_other:.2f} ({step.eager.case}; {step.other.case})"

    def of(one: Ratio) -> str:
        return f"{one.median:.2f} ({one.case})"

    lines = [
        "| CPU time ratio, less is faster | best | worst |",
        "|---|---|---|",
        f"| `clip_grad_norm_` / torch's | {of(best(clips))} | {of(worst(clips))} |",
        f"| per-sample clipped step / plain step | {of(best(plain))} | {of(worst(plain))} |",
        f"| clipped step / fastest other library | {over_other(compared[0])} | {over_other(compared[-1])} |",
    ]
    return "\n".join(lines)


def groups() -> Iterator[tuple[str, str, list[Row]]]:
    """Yield the groups of the table of ratios: what over what, the file it is from, and its rows."""
    slowest = worst(by_batch())
    slowest.case += f", {date_of(f'persample-batches-{slowest.case.split()[0].lower()}')}"
    per_sample: list[Row] = [(step.eager, step.compiled, step.other) for step in steps()]
    yield "clipped per-sample step / plain step", "persample-mlp", [*per_sample, alone(slowest)]
    everything = clipping(kinds=("norm 1", "norm 2", "norm inf", "value"))
    clips = [*clipping(dtypes=("float32",)), worst(everything)]
    clips = [one for one in clips if not one.case.startswith("1000 tensors")]  # those of 20000 are the same, only more
    yield "`clip_grad_norm_` / torch's faster way", "clip", [alone(one) for one in clips]
    faster = "clip_grad_norm_ is faster by"
    ranks = [inverse(row["case"], row[faster]) for row in rows_of("ranks") if faster in row]
    ranks = [one for one in ranks if not one.case.startswith(("100 ", "3200 "))]
    yield "`clip_grad_norm_` on four ranks / torch's", "ranks", [alone(one) for one in ranks]
    on_ranks = [
        ratio(f"{row['case']}, {how.upper()}", row[f"{how}: clipped takes longer by"])
        for row in rows_of("persample-ranks")
        for how in ("ddp", "fsdp")
    ]
    yield "clipped per-sample step on two ranks / plain step", "persample-ranks", [alone(one) for one in on_ranks]
    calls = [ratio(f"{row['case']}, {row['call']}", row["gradrein_over_torch"]) for row in rows_of("autograd")]
    yield "`backward`, `grad` / torch's", "autograd", [alone(best(calls)), alone(worst(calls))]
    passes = rows_of("trace_overhead")
    anomaly = "torch.detect_anomaly"
    nonfinite: list[Row] = [
        (ratio(row["case"], row["gradrein.detect_nonfinite"]), None, ratio(anomaly, row[anomaly])) for row in passes
    ]
    yield "`detect_nonfinite` / plain pass", "trace_overhead", nonfinite
    traces = [ratio(row["case"], row["trace"]) for row in passes]
    yield "`trace` / plain pass", "trace_overhead", [alone(one) for one in traces]


def alone(ours: Ratio) -> Row:
    """A row with nothing beside it."""
    return ours, None, None


def ratios() -> str:
    """Return the one table of ratios."""
    lines = ["| time over | case | gradrein | compiled | best other |", "|---|---|---|---|---|"]
    for what, stem, rows in groups():
        for number, (ours, compiled, other) in enumerate(rows):
            beside = f"{other} {other.case}" if other else ""
            head = "" if number else f"{what}, {date_of(stem)}"
            lines.append(f"| {head} | {ours.case} | {ours} | {compiled or ''} | {beside} |")
    return "\n".join(lines) + "\n"


def families() -> str:
    """Return the table of public model families."""
    rows = [ratio(row["family"], row["clipped over plain"]) for row in rows_of("families")]
    lines = [f"| {' | '.join(one.case for one in rows)} |", "|" + "---|" * len(rows)]
    return FAMILIES + "\n".join([*lines, f"| {' | '.join(f'{one.median:.2f}' for one in rows)} |"]) + "\n"


def steady() -> str:
    """Return what each way to clip reached, one row for each length."""
    path = RESULTS / "steady.json"
    if not path.exists():
        return ""
    lines = [f"| length | {' | '.join(COMPARED)} |", "|" + "---|" * (len(COMPARED) + 1)]
    for length, rows in json.loads(path.read_text())["lengths"].items():
        lines.append(f"| {length} | {' | '.join(mean_and_worst(rows, way) for way in COMPARED)} |")
    return STEADY + "\n".join(lines) + "\n"


def launches() -> str:
    """Return what calls launch and read on the simulated device, in two tables."""
    lines = ["| call | 6 float32 | 300 bfloat16 |", "|---|---|---|"]
    lines += [
        f"| {row['call']} | {_counts(row['6 float32'])} | {_counts(row['300 bfloat16'])} |"
        for row in rows_of("launches")
        if row["table"] == "clipping" and "order" not in row["call"]
    ]
    lines += ["", "| step of | plain | ours |", "|---|---|---|"]
    lines += [
        f"| {row['call']} | {_counts(row['plain'])} | {_counts(row['clipped'])} |"
        for row in rows_of("launches")
        if row["table"] == "per sample"
    ]
    return LAUNCHES + "\n".join(lines) + "\n"


def _counts(pair: list[int]) -> str:
    return f"{pair[0]}, {pair[1]}" if pair[1] else str(pair[0])


def page() -> str:
    """Return the whole page of benchmarks."""
    return HEAD + ratios() + "\n" + families() + "\n" + launches() + "\n" + steady()


def with_figures(text: str) -> str:
    """Return a page with its table of figures written anew."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{front()}\n{END}{rest.split(END)[1]}"


def home(readme: str) -> str:
    """Return the home page of the site: the README without badges, with the links of a page in docs/."""
    text = re.sub(r"^\[!\[.*\n\n", "", readme, flags=re.MULTILINE)
    text = text.replace("](docs/", "](")
    text = re.sub(r"\]\((CHANGELOG|CONTRIBUTING)\.md", lambda found: found[0].lower(), text)
    return "---\nhide: [navigation, toc]\n---\n\n" + text


def main() -> None:
    """Write all pages."""
    (ROOT / "docs" / "benchmarks.md").write_text(page())
    readme = with_figures((ROOT / "README.md").read_text())
    (ROOT / "README.md").write_text(readme)
    (ROOT / "docs" / "index.md").write_text(home(readme))


if __name__ == "__main__":
    main()
