"""The lines of a record, key by key. Each line is a JSON object; its kind follows from the first key listed here."""

from typing import Any, TypeAlias, TypedDict

VERSION = 2

Number: TypeAlias = float | str | None
"""A number as a line holds it: JSON has no NaN and no infinity, so those are the words "nan", "inf" and "-inf"."""


class RankHeader(TypedDict):
    """What the header of one of several processes holds besides.

    Attributes:
        rank: Its number among `world`.
        launch: The same on all ranks of one launch.
        process: Host name and process id.
    """

    rank: int
    world: int
    launch: str
    process: tuple[str, int]


class OptimizerLine(TypedDict, total=False):
    """An optimizer, before its first step and whenever its parameters have changed.

    Attributes:
        optimizer: Its class.
        opt: Its number.
        names: Its parameters, in its order; `sizes`, `trained` (whether they require gradients) and `shards` alike.
        groups: The number of parameters in each parameter group.
        update_stride: Weights are compared on every so many elements.
        shards: Of DTensors: which shard of how many this rank holds. None of a plain tensor.
        settings: Numbers of the first parameter group, such as momentum, betas and weight decay.
        dtypes: The types of the parameters.
    """

    optimizer: str
    opt: int
    names: list[str]
    sizes: list[int]
    trained: list[bool]
    groups: list[int]
    update_stride: int
    shards: list[list[int] | None]
    settings: dict[str, Any]
    dtypes: list[str]


class StepLine(TypedDict, total=False):
    """A step. Keys that are not known are left out.

    Attributes:
        step: Its number among the steps of optimizer `opt`.
        time: Seconds since recording began.
        loss: The sum of what `backwards` backward passes were called on.
        norm: 2-norm of all gradients before clipping; `norms` that of each, None where there is no gradient.
        peak: The largest `norm` among the `n_steps` steps that this line stands for.
        lr: Of each parameter group.
        update: Distance the weights moved, relative to their norm.
        unmoved: Indices of the parameters that did not move.
        step_grad_cosine: Cosine between the previous step and this gradient. Positive: the step went too far.
        clip: The factor the norm was reduced by, 0 where the step was skipped; absent where nothing clips.
        max_norm: The threshold of clipping, where it is fixed and known.
        nonfinite: Parameters with NaN or infinite values, and how many.
        samples: The number of per-sample norms given; `sample_square` is their mean square, `sample_ratio` the largest
            over the median.
        host_s: Of a rank: seconds since the last step outside backward passes; `backward_s` inside them; `data_s`
            those of `host_s` spent waiting for a DataLoader.
        partial_sums: Of a rank with shards: its terms of the squares of the move and of the weights after it, of the
            product of the last move and this gradient, and of both squared. `update` and `step_grad_cosine` follow
            from their sums over all ranks.
    """

    step: int
    opt: int
    time: float
    loss: Number
    backwards: int
    norm: Number
    norms: list[Number]
    peak: Number
    n_steps: int
    lr: list[Number]
    update: Number
    unmoved: list[int]
    step_grad_cosine: Number
    clip: Number
    max_norm: float
    nonfinite: dict[str, int]
    samples: int
    sample_square: float
    sample_ratio: Number
    host_s: Number
    backward_s: Number
    data_s: Number
    partial_sums: list[Number]


class NoteLine(TypedDict, total=False):
    """Anything else, with the number of steps before it.

    Attributes:
        note: The kind of a note of the script; its values are further keys.
        anomaly: What `--anomaly` names as the origin of a NaN.
        stopped: Why recording stopped before the run did.
        unmeasured: A parameter whose gradient cannot be measured, and the `reason`.
        ended: Last line of a rank: None, or why it ended early. Missing where the process was killed.
    """

    note: str
    anomaly: str
    stopped: str
    unmeasured: str
    reason: str
    ended: str | None
    after: int
    rank: int
    loss: float


class BatchLine(TypedDict):
    """Which samples a step was taken on that stands out, by the data loader's indices.

    Attributes:
        batch: The indices of the batches that were loaded last before its backward passes.
        dataset: How many samples the data set has.
        opt: The optimizer; `after` the number of its step.
    """

    batch: list[int]
    dataset: int
    opt: int
    after: int


class CurveLine(TypedDict, total=False):
    """A value of a loss on other data, with the number of steps `after` which it came.

    Attributes:
        curve: Its name, such as "val loss".
        origin: Where it was read: "printed", "no_grad", "TensorBoard", "wandb", "trainer".
        value: The value.
        epoch: The epoch or step that was printed with it.
        unnamed: True where a line names the data and not what the number is.
    """

    curve: str
    origin: str
    value: Number
    after: int
    epoch: float
    unnamed: bool


class SiteLine(TypedDict, total=False):
    """Where the script calls something for the first time.

    Attributes:
        site: "backward", or "step" of optimizer `opt`, or "made": the statement that makes it.
        file: The file; `line` the number of the line, `text` what it says, `indent` by how many characters.
        end: The last line of that statement.
        names: What the script calls the optimizer and the model, None where that was not found.
        library: The package, where the call is not in the script but in one.
        loss_graph: Of a loss: the `power` that its terms are raised to, `of` what, and whether they are `weighted`.
    """

    site: str
    opt: int
    file: str
    line: int
    end: int
    text: str
    indent: int
    names: dict[str, str | None]
    library: str
    loss_graph: dict[str, Any]
    after: int


Line: TypeAlias = dict[str, Any]
"""A line as it was read: one of the above."""


def is_step(line: Line) -> bool:
    """Return whether it is the line of a step: a note of the script may have a value called `step`."""
    return "step" in line and "note" not in line
