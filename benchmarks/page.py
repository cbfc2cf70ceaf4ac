"""Write docs/benchmarks.md from the JSON files in results/: what was measured, how, and where, losses included.

The tables of other pages too, by tables.py.

python benchmarks/page.py
"""

from __future__ import annotations

import pathlib

import tables

HERE = pathlib.Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"

HEAD = """# Benchmarks

Written by `python benchmarks/page.py` from `benchmarks/results/`. Every row is a ratio taken within one interleaved run
(contenders take turns; the ratio is taken in each round; shown is the median with quartiles). In columns that say
"faster" a value below 1 is a loss for gradrein; all other ratios are our time over a plain pass, torch or the memory
limit, and above 1 is what it costs. Nothing here was measured on a GPU. What watching costs is in
[watch.md](watch.md). The last section is no timing: how the ways to clip compare on tasks that swing.

## In short

**What a whole clipped per-sample step costs**, over a plain eager step of the same model and batch, by the clock and
median over rounds. "Compiled" is what `gradrein.compile` keeps by itself, which may be the eager step; "best peer" is
the fastest other library that runs the model. Each method has a process of its own:

{short}

![Clipped step over plain step, for each model and method](charts/per-sample-methods.svg)

**It costs relatively less the larger the batch is:**

![Ratio to a plain step against the batch](charts/per-sample-batches.svg)

**Clipping by norm runs at the speed of memory on large models**, and loses a factor of two to Python on thousands of
tiny tensors, where torch loses ten:

![Time of clipping over the memory limit](charts/clip-limit.svg)

**What clipping sends does not grow with the number of ranks.** Counted for 800 parameters, not timed; torch sends less,
gradrein's message also compares the calls of the ranks:

![Bytes per call and rank against the number of ranks](charts/growth-with-ranks.svg)
"""

TITLES = {
    "autograd": "backward and grad against torch",
    "clip": "Clipping against torch",
    "clip-policies": "Policies that remember every element",
    "fold": "Clipping folded into the optimizer's step",
    "persample-depths": "Per-sample clipping by depth",
    "persample-memory": "Per-sample clipping, peak memory",
    "persample-memory-compiled": "Per-sample clipping, peak memory of compiled steps",
    "persample-ranks": "Per-sample clipping on two ranks",
    "ranks": "Clipping on four ranks against torch",
    "ranks-counted": "Clipping on up to 16,384 ranks, counted",
    "trace_overhead": "Traces, replay and the search for a NaN",
}

MODELS = {"resnet": "ResNet-18", "llama": "Llama", "experts": "experts"}

STEADY = """## steady

Written by `python benchmarks/steady.py`, which explains the columns. Each cell: final and best test loss over those of
the best fixed threshold (below 1 is better than the best of the thresholds, chosen in hindsight), and the swing. The
tasks of the second list and the healthy runs were written down before `auto` was changed for the last time, were run
without clipping only until then, and neither they nor the rule of `auto` have been changed since; the advice has, for
what they showed. The tasks of the third list were written down before the advice was changed and not changed since;
ways that do not depend on the advice were run and not looked at until it was. `heavy_tail` and `loss_power` were made
stricter afterwards, for runs of none of these lists, and what is watched and advised was run once more with that: three
of 160 runs changed. Each table says how many seeds it is of: ten of the third list and the healthy runs, one or two of
the others, where single runs differ by chance, those of `gan`, `gan_modes`, `waves_adamw` and `reinforce` by a factor.
No seed was chosen; those of the tasks it was built on are the ones it was built with.
"Swing, seen, of" counts runs without clipping that swing, those of them in which `gradrein watch` found something, and
all that were watched. The last lines of a table are over the tasks that swing, at either length, and over all.

`auto` and the advice are to be within 1.25 in the mean and 2 in the worst case, on tasks that swing. On the third list
(ten seeds) both are: `auto` 1.08 and 1.97 at length 1x, 0.53 and 1.51 at 4x; the advice 0.84 and 1.87, 0.48 and 1.63.
`sines` alone is far below 1: without it the means of `auto` are 1.20 and 1.09, those of the advice 1.27 and 1.07. The
worst case is that of a task, over its seeds; single runs end up to 21 times above (`auto`), and one 150 times (advice:
a run of `bursts` whose units die in its first steps, so that nothing swings and nothing is advised). Of runs that swing
`gradrein watch` sees 61 of 62 at 1x and 59 of 59 at 4x; of 160 healthy ones it finds fault with none. A run with `auto`
is not to end above twice its lowest loss at 4x: the worst one ends at 4.9 times. The eighth task, `recall`, does not
swing and needs no help: a threshold of 0.01 brings its loss down a hundred times further, so every other way is far
above 1 there, and with it the means over all eight tasks are 1.59 and 0.94 for the advice, 1.70 and 0.90 for `auto`.
On the second list (one to two seeds, an earlier state) `auto` is within both limits (0.97 and 1.42; 0.94 and 1.80); the
advice is in the mean (1.09; 1.15) and not in the worst case (2.62; 23.1), on `attention`, where after 1x nothing is
found with the one seed that was run to the end, so that nothing is advised.
Of the first list (one seed) `adam_transformer`, `deep_mlp` and `reinforce` are above 2 for the same reason, at one
length or both: nothing was found, or nothing that calls for a change; `physics` and `gan` are because `auto` is.

"""


# Models and batches of the short table, in the order of its columns.
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


def short() -> str:
    """Return the table of what a clipped step costs, for all models that were measured."""
    found = {}
    for stem, name in SHORT.items():
        path = HERE / "results" / f"persample-{stem}.json"
        if path.exists():
            found[name] = tables.read_results(path)
    rows: dict[str, list[str]] = {
        "": list(found),
        "gradrein": [],
        "compiled": [],
        "best peer": [],
        "plain compiled": [],
    }
    for content in found.values():
        ratios = {row["method"]: row["clock"]["median"] for row in content["rows"] if "clock" in row}
        clipped = [row["method"] for row in content["rows"] if "gradient_error" in row]
        peer = min((name for name in clipped if not name.startswith("gradrein")), key=ratios.__getitem__, default="")
        rows["gradrein"].append(_two_digits(ratios.get("gradrein")))
        rows["compiled"].append(_two_digits(ratios.get("gradrein fastest")))
        rows["best peer"].append(f"{_two_digits(ratios[peer])} ({peer})" if peer else "")
        rows["plain compiled"].append(_two_digits(ratios.get("plain compiled")))
    rows["threads"] = [str(content["environment"]["torch_threads"]) for content in found.values()]
    lines = [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join([lines[0], "|" + "---|" * (len(found) + 1), *lines[1:]])


def _two_digits(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def cell(value: object) -> str:
    if isinstance(value, dict) and set(value) == {"median", "low", "high"}:
        return f"{value['median']:.2f} [{value['low']:.2f}-{value['high']:.2f}]"
    if isinstance(value, dict):
        return ", ".join(f"{k} {cell(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(cell(v) for v in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(rows: list[dict[str, object]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(c.replace("_", " ") for c in columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(cell(row.get(c, "")) for c in columns) + " |" for row in rows]


def title(stem: str) -> str:
    if stem in TITLES:
        return TITLES[stem]
    for prefix, name in (("persample-batches-", "Per-sample clipping by batch"), ("persample-", "Per-sample clipping")):
        if stem.startswith(prefix):
            model, _, batch = stem.removeprefix(prefix).partition("-")
            of = MODELS.get(model, model.upper())
            return f"{name}, {of} at batch {batch}" if batch else f"{name}, {of}"
    return stem


def section(path: pathlib.Path) -> str:
    content = tables.read_results(path)
    where = content["environment"]
    place = f"{where['cpu']}, {where['cores']} cores, torch {where['torch']}, Python {where['python']}, {where['date']}"
    method = content["method"].strip().splitlines()
    lines = [
        f"## {title(path.stem)}",
        "",
        f"`benchmarks/results/{path.name}`",
        "",
        method[0],
        "",
        f"Measured on: {place}.",
        "",
        *table(content["rows"]),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    found = sorted((HERE / "results").glob("*.json"))
    sections = [section(path) for path in found if "rows" in tables.read_results(path)]
    steady = HERE / "results" / "steady.md"
    if steady.exists():
        sections.append(STEADY + steady.read_text().replace("bridle", "gradrein"))
    PAGE.write_text("\n".join([HEAD.format(short=short()), *sections]))
    tables.main()


if __name__ == "__main__":
    main()
