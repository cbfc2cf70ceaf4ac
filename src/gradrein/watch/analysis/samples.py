"""Which samples were in the batches of some steps, and which of them are there too often to be there by chance."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..run.run import Run

_SHOWN = 16
_CHANCE = 0.01  # that any sample of an even draw is named
_LARGEST = "indices of the samples in the batch of the largest"
_LARGEST_KEPT = f"{_LARGEST} whose samples were recorded"
_OFTEN = "samples in most of those batches, and in how many"


def samples_of(run: Run, steps: Mapping[int, float]) -> dict[str, Any]:
    """Return as evidence the samples of the batches of these steps; nothing where no data loader was seen.

    A sample is named as one that is there often where an even draw of as many would, with a chance of 1%, hold
    any sample that often.

    Args:
        run: The run.
        steps: The steps, and how far each stands out: what the finding calls the largest is the largest here too.
    """
    batches = [line for line in run.notes if "batch" in line and "note" not in line]
    known = [line for line in batches if line["opt"] == run.opt and line["after"] in steps]
    if not known:
        return {}
    worst = max(known, key=lambda line: steps[line["after"]])
    rows, at = worst["batch"], worst["after"]
    which = _LARGEST if steps[at] == max(steps.values()) else _LARGEST_KEPT  # not every batch is in a record
    found: dict[str, Any] = {f"{which} (step {at})": [*rows[:_SHOWN], *(["..."] if len(rows) > _SHOWN else [])]}
    if often := _often(known):
        found[_OFTEN] = {row: f"{n} of {len(known)}" for row, n in often[:_SHOWN]}
    return found


def look_first(evidence: dict[str, Any], worst: int) -> str:
    """Return what to look at first: samples that stand out, else the batch of the step `worst`."""
    often = evidence.get(_OFTEN, {})
    if not often:
        return f"the batch of step {worst}"
    rows = ", ".join(map(str, list(often)[:5]))
    some = f"samples {rows} of the dataset, which are" if len(often) > 1 else f"sample {rows} of the dataset, which is"
    return f"{some} in far more of the bad batches than chance explains"


def _often(batches: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return the samples that are in more batches than chance explains, the most frequent first."""
    counts = Counter(row for line in batches for row in set(line["batch"]))
    size = max(line["dataset"] for line in batches)
    expected = sum(counts.values()) / size
    return [(row, n) for row, n in counts.most_common() if n > 1 and size * _tail(n, expected) < _CHANCE]


def _tail(n: int, mean: float) -> float:
    """Return an upper bound of the chance that a Poisson variable of this mean is at least n."""
    return 1.0 if n <= mean else math.exp(n - mean + n * math.log(mean / n))
