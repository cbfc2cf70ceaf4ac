"""A run, read back from its record."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .curves import Curve, curves_of
from .values import number


@dataclass(frozen=True)
class NonfiniteStep:
    """A step with NaN or infinite gradients: how many values, by parameter."""

    step: int
    offenders: dict[str, int]
    loss: float


@dataclass(frozen=True)
class Run:
    """The steps of one optimizer, as columns. NaN stands for a number that was not recorded.

    Attributes:
        path: The file.
        header: Its first line.
        optimizer: The class of the optimizer.
        opt: Its number in the record.
        n_optimizers: How many optimizers the record holds.
        names: Parameters, in the optimizer's order; `sizes` their numbers of elements, `trained` whether they should
            move, `shards` which shard of how many a rank holds (None for a plain tensor).
        steps: The step that each entry of the following columns belongs to.
        loss: The value that backward was called on.
        norm: The gradient norm before any clipping; `peak` the largest among the steps that a line stands for.
        norms: For each step the norm of each parameter's gradient, None if it had none.
        lr: The learning rate of the first parameter group.
        update: Distance the weights moved, relative to their norm.
        step_grad_cosine: Cosine between the previous step and this gradient.
        clip: The factor by which clipping reduced the norm, NaN if nothing clips.
        max_norm: The clipping threshold, NaN if there is no fixed one.
        n_steps: How many steps the line stands for.
        unmoved: Indices of parameters that did not move.
        samples: Batch size and mean square of the per-sample norms, if given.
        partial_sums: The terms that a rank contributes to the sums behind `update` and `step_grad_cosine`, if
            parameters are sharded.
        nonfinite: Steps with NaN or infinite gradients.
        notes: Lines of other kinds.
        settings: Numbers of the optimizer's first parameter group, such as momentum and weight decay.
        dtypes: The dtypes of its parameters.
        sample_ratio: The largest per-sample gradient norm divided by the median one, if given.
        warnings: Sentences about numbers that were not taken as they are.
        ranks: For several processes, the run of each that left a record, in order. All other numbers are then those of
            the lowest rank, and norms are of whole gradients.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> with gradrein.Monitor(None, optimizer) as monitor:
        ...     weight.sum().backward()
        ...     optimizer.step()
        >>> run = gradrein.watch.read_run(monitor.path)
        >>> run.norm, run.loss
        ([1.0], [0.0])

    See Also:
        [`gradrein.watch.read_run`][], [`gradrein.watch.Report`][]
    """

    path: Path
    header: dict[str, Any]
    optimizer: str
    names: list[str]
    sizes: list[int]
    trained: list[bool]
    opt: int = 0
    n_optimizers: int = 1
    shards: list[list[int] | None] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    norm: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)
    norms: list[list[float | None]] = field(default_factory=list)
    lr: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    step_grad_cosine: list[float] = field(default_factory=list)
    clip: list[float] = field(default_factory=list)
    max_norm: list[float] = field(default_factory=list)
    n_steps: list[int] = field(default_factory=list)
    unmoved: list[set[int]] = field(default_factory=list)
    samples: list[tuple[int, float] | None] = field(default_factory=list)
    partial_sums: list[list[float]] = field(default_factory=list)
    nonfinite: list[NonfiniteStep] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    dtypes: list[str] = field(default_factory=list)
    sample_ratio: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    ranks: tuple[Run, ...] = ()

    @property
    def rank(self) -> int:
        """The rank of this process; 0 if there is only one."""
        return int(self.header.get("rank", 0))

    @property
    def end(self) -> str | None:
        """How a rank's run ended: "" if normally, else why; None if the record breaks off, as for a killed process."""
        last: dict[str, Any] = next((n for n in reversed(self.notes) if "ended" in n or n.get("note") == "resumed"), {})
        return str(last["ended"] or "") if "ended" in last else None

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks that left no record of this run."""
        there = {run.rank for run in self.ranks}
        return [rank for rank in range(self.header.get("world", 1)) if self.ranks and rank not in there]

    @property
    def unmeasured(self) -> dict[str, str]:
        """Parameters whose gradients could not be measured, and why."""
        return {line["unmeasured"]: line["reason"] for line in self.notes if "unmeasured" in line}

    @property
    def threshold(self) -> float | None:
        """The fixed threshold at which gradients were last clipped; None if there was none or an adaptive one."""
        known = [limit for limit, clip in zip(self.max_norm, self.clip, strict=True) if not math.isnan(clip)]
        return known[-1] if known and math.isfinite(known[-1]) else None

    @cached_property
    def curves(self) -> list[Curve]:
        """Losses on other data, as the script noted, logged, printed or computed them."""
        return curves_of(self.notes, self.steps, self.loss)

    @property
    def test(self) -> Curve | None:
        """The most directly known validation or test loss, or None."""
        return self.curves[0] if self.curves else None

    def noted_losses(self, kind: str) -> list[tuple[int, float]]:
        """Return the losses noted by the script, such as on the test set: (after which step, loss)."""
        return [(n["after"], number(n["loss"])) for n in self.notes if n.get("note") == kind and "loss" in n]
