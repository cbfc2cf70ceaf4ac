"""What a name such as `val_loss`, `Loss/test` or `eval loss` is about."""

import re


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


OTHER_DATA = _set("test testing te tst ts val va vali valid validation vl eval evaluation ev dev holdout heldout")
TRAINING = _set("train training trn tr")
LOSSES = _set("loss losses nll ce bce mse l1 l2 xent xe cost crossentropy logloss objective")
INDICES = _set("epoch epochs ep step steps iter iters iteration it batch batches round global")
# Words that say nothing about which number it is: an error may be a loss or a share.
PLAIN = _set(
    "avg average mean total overall set data split is the at of after on for in this value current results result "
    "metrics metric summary running end final log info model dataset images samples subset cur error err main"
)
# A number after one of these is derived from others, or from earlier ones.
DERIVED = _set(
    "best min minimum max maximum lowest highest prev previous old target std var variance delta diff gap ratio "
    "improved improvement decreased increased better from to than change ema smoothed patience"
)

_PARTS = re.compile(r"[lL][12](?![a-z\d])|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_JOINED = re.compile(r"(?<![A-Z])(v|val|valid|test|eval|dev|train)(?=(loss|mse|nll|bce|err|error)(?![A-Z]))", re.I)


def words(name: str) -> list[str]:
    """Split a name into lower-case words: at separators, and where small letters turn to capitals.

    `valloss` is two words, `vloss` and `L_val` are the same two.
    """
    split = [part.lower() for part in _PARTS.findall(_JOINED.sub(_apart, name)) if not part.isdigit()]
    if len(split) == 2 and "l" in split and not (OTHER_DATA | TRAINING).isdisjoint(split):
        split[split.index("l")] = "loss"
    return split


def _apart(match: re.Match[str]) -> str:
    return "val " if match[1].lower() == "v" else f"{match[1]} "


def other_data_loss(name: str) -> str | None:
    """Return a name for a curve, such as "val loss", if this is the name of a loss on other data."""
    parts = words(name)
    split = next((w for w in parts if w in OTHER_DATA), None)
    metric = next((w for w in parts if w in LOSSES), None)
    known = OTHER_DATA | LOSSES | PLAIN | INDICES
    if split is None or metric is None or not all(w in known for w in parts):
        return None
    return f"{split} {metric}"
