"""The lines of a record, key by key. Each line is a JSON object; its kind is the first key of `KEYS` that it has."""

from typing import Any, TypeAlias

VERSION = 2

Number: TypeAlias = float | str | None
"""A number as a line holds it: JSON has no NaN and no infinity, so those are the words "nan", "inf" and "-inf"."""

Line: TypeAlias = dict[str, Any]
"""A line of a record."""

_PLACE = {"after": "the number of steps before it"}

KEYS: dict[str, dict[str, str]] = {
    "note": {  # first: a note of the script may have a value called `step`
        "note": "the kind of a note of the script; its values are further keys",
        "loss": "such a value",
        "rank": "the rank it came from, after merging",
        **_PLACE,
    },
    "step": {  # of a step; keys that are not known are left out
        "step": "its number among the steps of optimizer `opt`",
        "opt": "the number of the optimizer",
        "time": "seconds since recording began",
        "loss": "the sum of what `backwards` backward passes were called on",
        "backwards": "the number of backward passes, where it is not 1",
        "norm": "2-norm of all gradients before clipping",
        "norms": "that of each, None where there is no gradient",
        "peak": "the largest `norm` among the `n_steps` steps that this line stands for",
        "n_steps": "how many steps this line stands for",
        "lr": "the learning rate of each parameter group",
        "update": "distance the weights moved, relative to their norm",
        "unmoved": "indices of the parameters that did not move",
        "step_grad_cosine": "cosine between the previous step and this gradient. Positive: the step went too far",
        "clip": "the factor the norm was reduced by, 0 where the step was skipped; absent where nothing clips",
        "max_norm": "the threshold of clipping, where it is fixed and known",
        "nonfinite": "parameters with NaN or infinite values, and how many; 0 where they were not counted",
        "samples": "the number of per-sample norms given",
        "sample_square": "their mean square",
        "sample_ratio": "the largest over the median",
        "partial_sums": "of a rank with shards: its terms of the sums that `update` and `step_grad_cosine` follow from",
    },
    "optimizer": {  # before its first step and whenever its parameters have changed
        "optimizer": "its class",
        "opt": "its number",
        "names": "its parameters, in its order",
        "sizes": "their numbers of elements",
        "trained": "whether they require gradients",
        "shards": "of DTensors: which shard of how many this rank holds; None of a plain tensor",
        "settings": "numbers of the first parameter group, such as momentum, betas and weight decay",
        "dtypes": "the types of the parameters",
    },
    "anomaly": {"anomaly": "what `--anomaly` names as the origin of a NaN", **_PLACE},
    "stopped": {"stopped": "why recording stopped before the run did", **_PLACE},
    "unmeasured": {
        "unmeasured": "a parameter whose gradient cannot be measured",
        "reason": "why",
        **_PLACE,
    },
    "ended": {
        "ended": "last line of a rank: None, or why it ended early. Missing where the process was killed",
        **_PLACE,
    },
    "batch": {  # which samples a step was taken on that stands out
        "batch": "indices of the batches that were loaded last before its backward passes",
        "dataset": "how many samples the data set has",
        "opt": "the optimizer",
        "after": "the number of its step",
    },
    "curve": {  # a value of a validation or test loss
        "curve": 'its name, such as "val loss"',
        "origin": 'where it was read: "printed", "no_grad", "TensorBoard", "wandb", "trainer"',
        "value": "the value",
        "epoch": "the epoch or step that was printed with it",
        "unnamed": "True where a line names the data and not what the number is",
        **_PLACE,
    },
    "site": {  # where the script calls something for the first time
        "site": '"backward", or "step" of optimizer `opt`, or "made": the statement that makes it',
        "opt": "the optimizer",
        "file": "the file",
        "line": "the number of the line",
        "text": "what it says",
        "names": "what the script calls the optimizer, None where that was not found",
        "library": "the package, where the call is not in the script but in one",
        "loss_graph": "of a loss: the `power` its terms are raised to, `of` what, and whether they are `weighted`",
        **_PLACE,
    },
}


def is_step(line: Line) -> bool:
    """Return whether it is the line of a step: a note of the script may have a value called `step`."""
    return "step" in line and "note" not in line
