"""Read losses on other data from a line that a script prints.

A number belongs to the words before it: `val loss 0.31`. Numbers in per cent, with a unit, counts such as 9/20, and
those of accuracies, times, learning rates and earlier bests are not taken. Where a line names the data but not what
the number is (`train 0.40  test 0.52`), the reading is marked unnamed and has the number for the training data with it:
whoever reads the record compares that with the training loss. `loss 0.41 (eval 0.38)` says what it is.
"""

import re
from dataclasses import dataclass, replace

from .labels import DERIVED, INDICES, LOSSES, OTHER_DATA, PLAIN, TRAINING, other_data_loss, words

_LONGEST = 2000
_TOKEN = re.compile(
    r"(?P<number>(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?!\d|\.\d)|(?<!\w)[-+]?(?:nan|inf|NaN|Inf)(?!\w))"
    r"|(?P<word>[A-Za-z][A-Za-z0-9_@]*)|(?P<mark>[^\sA-Za-z0-9])"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RATES = re.compile(r"[\d.?]+ *(?:[A-Za-z]+/s|s/[A-Za-z]+)\b")  # of a progress bar: 41.2it/s
_TENSOR = re.compile(r"tensor\(([^,()]+)[^()]*\)")  # printed as it is: tensor(0.31, grad_fn=<MeanBackward0>)
_MEASURE = re.compile(r"(?<=loss) ?\((?:r?mse|mae|ce|bce|nll|l1|l2)\)", re.IGNORECASE)  # loss (RMSE): 0.31
_AVERAGED = re.compile(r"[-+.\deE]+ *\( *[-+.\deE]+ *\)")


@dataclass(frozen=True)
class Reading:
    """A number that a line gives.

    Attributes:
        name: Of the curve: the data and the metric, such as "val loss"; only the data where no metric is named.
        value: The number.
        named: Whether the line says that it is a loss.
        epoch: The epoch or step that the line names before it.
        train: Where it is not: what the line gives for the training data.
    """

    name: str
    value: float
    named: bool
    epoch: float | None = None
    train: float | None = None


@dataclass(frozen=True)
class _Number:
    text: str
    labels: list[str]  # words since the last number
    unit: str  # what follows directly: "%", "/", a word, or nothing
    ratio: bool  # the second of two as in 9/20
    in_brackets: bool  # directly after another number, as in 0.31 (0.33)

    @property
    def is_decimal(self) -> bool:
        return _is_decimal(self.text)


def read_line(line: str, heading: str | None = None) -> list[Reading]:
    """Return the losses on other data that a line gives, in its order.

    Args:
        line: The line.
        heading: The data that the line before names, from `heading_of`.
    """
    line = _ESCAPES.sub("", line)
    if len(line) > _LONGEST or (heading is None and OTHER_DATA.isdisjoint(words(line))):
        return []
    line = _MEASURE.sub("", _TENSOR.sub(r"\1", line))
    numbers = _numbers(_RATES.sub("", line))
    in_brackets = len(_AVERAGED.findall(line))  # the value of a batch, and the mean so far in brackets
    averaged = in_brackets >= 2 or (in_brackets == 1 and any(n.ratio for n in numbers))
    readings: list[Reading] = []
    split, carried, pending = heading, None, None
    epoch: float | None = None
    for i, number in enumerate(numbers):
        splits = [w for w in number.labels if w in OTHER_DATA or w in TRAINING]
        metric = _metric(number.labels)
        if splits:
            split = splits[-1]
            precedes = metric is not None and number.labels.index(splits[0]) > _position(number.labels, metric)
            carried = metric if precedes else carried
        if metric == "index":
            epoch = float(number.text) if epoch is None and not number.is_decimal else epoch
            pending = next((w for w in number.labels if w in LOSSES), None)  # as in "val loss after epoch 3: 0.44"
            continue
        if not number.labels:
            metric, pending = pending, None
        if len(set(splits)) > 1:
            readings += _listed(numbers[i : i + len(splits)], splits, metric, epoch)
            split = None
            continue
        taken = _taken(number, split if metric in LOSSES or splits else None, metric or carried, bool(splits))
        if taken is not None:
            following = numbers[i + 1] if i + 1 < len(numbers) else None
            use = following if averaged and following is not None and following.in_brackets else number
            readings.append(Reading(taken, float(use.text), taken.endswith(tuple(LOSSES)), epoch))
    return _told_apart(readings, numbers)


def _told_apart(readings: list[Reading], numbers: list[_Number]) -> list[Reading]:
    """Decide about unnamed readings by the other numbers of their line."""
    has_loss = any(_metric(n.labels) in LOSSES and OTHER_DATA.isdisjoint(n.labels) for n in numbers)
    train = next((float(n.text) for n in numbers if set(n.labels) & TRAINING and _metric(n.labels) is None), None)
    if has_loss and train is not None:  # as in "Loss: 0.42, Train: 0.91, Val: 0.88", which are accuracies
        return [r for r in readings if r.named]
    return [r if r.named else replace(r, named=has_loss, train=train) for r in readings]


def heading_of(line: str) -> str | None:
    """Return the data that a heading such as `Test Error:` names; None of any other line."""
    plain = _ESCAPES.sub("", line).strip()
    parts = words(plain)
    if not plain.endswith(":") or len(parts) > 4 or any(c.isdigit() for c in plain):
        return None
    return next((w for w in parts if w in OTHER_DATA), None)


def _taken(number: _Number, split: str | None, metric: str | None, direct: bool) -> str | None:
    """Return the name of the curve that a number belongs to."""
    if split is None or split in TRAINING or number.unit or number.ratio or set(number.labels) & DERIVED:
        return None
    if not direct and any(len(w) > 1 for w in set(number.labels) - LOSSES - PLAIN - INDICES):
        return None  # as in "Eval Loss=0.5, kl loss=0.2": a part of it
    if metric in LOSSES:
        return _full_name(split, metric, number.labels)
    return split if metric is None and direct and number.is_decimal else None


def _listed(numbers: list[_Number], splits: list[str], metric: str | None, epoch: float | None) -> list[Reading]:
    """Read `loss (train/val): 0.50 / 0.60`: as many numbers as data sets, in their order."""
    if metric not in LOSSES or len(numbers) != len(splits) or any(n.labels for n in numbers[1:]):
        return []
    if any(not n.is_decimal or n.unit not in ("", "/") for n in numbers) or set(numbers[0].labels) & DERIVED:
        return []
    pairs = zip(splits, numbers, strict=True)
    return [Reading(f"{split} {metric}", float(n.text), True, epoch) for split, n in pairs if split in OTHER_DATA]


def _metric(labels: list[str]) -> str | None:
    """Return what the words say a number is: a loss by its word, "index", "other", or None where they do not say."""
    last = next((w for w in reversed(labels) if w not in PLAIN | OTHER_DATA | TRAINING | DERIVED), None)
    return last if last is None or last in LOSSES else "index" if last in INDICES else "other"


def _full_name(split: str, metric: str, labels: list[str]) -> str:
    """Return the name of a curve, with all words for a loss: `nll_loss` is another one than `loss`."""
    return " ".join([split, *([w for w in labels if w in LOSSES] or [metric])])


def _position(labels: list[str], metric: str) -> int:
    return labels.index(metric) if metric in labels else 0


def _numbers(line: str) -> list[_Number]:
    tokens = list(_TOKEN.finditer(line))
    readings: list[_Number] = []
    labels: list[str] = []
    marks = ""
    for i, token in enumerate(tokens):
        if token.lastgroup == "word":
            labels += words(token[0])
        elif token.lastgroup == "mark":
            marks += token[0]
        else:
            following = tokens[i + 1] if i + 1 < len(tokens) else None
            between = not labels and bool(readings)
            readings.append(
                _Number(token[0], labels, _unit(token, following), between and marks == "/", between and marks == "(")
            )
            labels, marks = [], ""
    return readings


def _unit(token: re.Match[str], following: re.Match[str] | None) -> str:
    if following is None:
        return ""
    gap = following.start() - token.end()
    if following.lastgroup == "mark":
        return following[0] if following[0] in "%/" and gap <= 1 else ""
    counted = following.lastgroup == "word" and gap <= 1 and not _is_label(following[0])
    return following[0] if gap == 0 or (counted and not _is_decimal(token[0])) else ""


def _is_label(word: str) -> bool:
    return bool(set(words(word)) & (OTHER_DATA | TRAINING | LOSSES | INDICES))


def _is_decimal(text: str) -> bool:
    return any(c in text for c in ".eE") or text.lower().lstrip("+-") in ("nan", "inf")


class TableReader:
    """Reads tables: a line of names, then lines of as many numbers."""

    def __init__(self) -> None:
        self._columns: dict[int, str] = {}
        self._count = 0

    def read(self, line: str) -> list[Reading]:
        """Return the losses on other data in a row; a line of names begins a new table."""
        line = _ESCAPES.sub("", line)
        if len(line) > _LONGEST:
            return []
        cells = _cells(line)
        if len(cells) < 2:
            return []
        if not any(map(_is_number, cells)):
            named = {i: name for i, cell in enumerate(cells) if (name := other_data_loss(cell)) is not None}
            if named:
                self._columns, self._count = named, len(cells)
            return []
        if len(cells) != self._count:
            cells = line.replace("|", " ").split()
        cells = cells[len(cells) == self._count + 1 :]  # an index without a name
        if len(cells) != self._count or any(c.isalpha() for cell in cells for c in cell if c not in "eEsmhnaif"):
            return []
        return [r for i, name in self._columns.items() if (r := _cell(name, cells[i])) is not None]


def _cell(name: str, text: str) -> Reading | None:
    return Reading(name, float(text), True) if _is_number(text) else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _cells(line: str) -> list[str]:
    stripped = line.strip().strip("|").strip()
    for pattern in (r"\s*\|\s*", r"\s*,\s*", r"\s*\t\s*|\s{2,}"):
        cells = re.split(pattern, stripped)
        if len(cells) > 1:
            return cells
    return stripped.split()
