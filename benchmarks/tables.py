"""Write the tables of docs/scale.md and docs/per-sample.md that come from results/, each between two comments.

python benchmarks/tables.py
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

HERE = pathlib.Path(__file__).parent
DOCS = HERE.parent / "docs"


def read_results(path: pathlib.Path) -> dict[str, Any]:
    """Return results as they were written; those from before the project had its name say `bridle`."""
    return json.loads(path.read_text().replace("bridle", "gradrein"))


def of(ratio: dict[str, float], unit: str = "x") -> str:
    return f"{ratio['median']:.2f}{unit} ({ratio['low']:.2f}-{ratio['high']:.2f})"


def where(environment: dict[str, Any]) -> str:
    load = environment["load"][0]
    return f"{environment['cores']} cores of an {environment['cpu']}, torch {environment['torch']}, load {load:g}"


def ranks(content: dict[str, Any]) -> list[str]:
    """What clipping on four ranks costs beside torch, by the clock and by processor time."""
    calls, better = ("clip_grad_norm_", "clip_"), ("is faster", "needs less processor time")
    lines = [
        f"{where(content['environment'])}, {content['environment']['date']}:",
        "",
        "| gradients | `clip_grad_norm_` is faster by | needs less processor time by | `clip_` is faster by "
        "| needs less processor time by | messages of each, and torch's |",
        "|---|---|---|---|---|---|",
    ]
    for row in content["rows"]:
        if "collectives" in row:
            sent = row["collectives"]
            told = [of(row[f"{call} {what} by"]) for call in calls for what in better]
            messages = ", ".join(str(sent[who]) for who in (*calls, "torch"))
            lines.append(f"| {row['case']} | {' | '.join(told)} | {messages} |")
    times = next(row for row in content["rows"] if "collectives" not in row)["milliseconds"]
    alone = (
        f"The message alone takes {times['4 ranks']:g} ms between four ranks, {times['2 ranks']:g} between two; the\n"
        f"all-reduce of gloo {times['4 ranks, all-reduce']:g} and {times['2 ranks, all-reduce']:g}."
    )
    return [*lines, "", alone]


def persample_ranks(content: dict[str, Any]) -> list[str]:
    """What a step that is clipped per sample costs beside a plain one on two ranks."""
    lines = [
        f"{where(content['environment'])}, {content['environment']['date']}:",
        "",
        "| model | one process, no sum | DDP | FSDP2 |",
        "|---|---|---|---|",
    ]
    for row in content["rows"]:
        told = [of(row[f"{how}: clipped takes longer by"], "") for how in ("alone", "ddp", "fsdp")]
        lines.append(f"| {row['case']}, batch {row['batch of each rank']} on each rank | {' | '.join(told)} |")
    return lines


TABLES = {"ranks": ("scale.md", ranks), "persample-ranks": ("per-sample.md", persample_ranks)}


def main() -> None:
    for name, (page, write) in TABLES.items():
        begin, end = f"<!-- {name}: written by benchmarks/tables.py -->", f"<!-- end of {name} -->"
        text = (DOCS / page).read_text()
        before, rest = text.split(begin)
        table = "\n".join(write(read_results(HERE / "results" / f"{name}.json")))
        (DOCS / page).write_text(f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    main()
