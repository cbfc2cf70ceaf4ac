"""Named findings: one file each, and one entry in the table below.

Each file has one function from a run to a finding, or to None where its test does not speak.
"""

from __future__ import annotations

from collections.abc import Callable

from .._finding import Finding
from .._run import Run
from ._clip_idle import clip_idle
from ._clip_tight import clip_tight
from ._dead import dead
from ._depth import depth
from ._dominant import dominant
from ._edge import edge_of_stability
from ._heavy_tail import heavy_tail
from ._noise_scale import noise_scale
from ._nonfinite import nonfinite
from ._oscillation import oscillation
from ._rank_norms import rank_norms
from ._spikes import spikes
from ._straggler import straggler

__all__ = ["TABLE", "find"]

TABLE: tuple[Callable[[Run], Finding | None], ...] = (
    nonfinite,
    rank_norms,
    oscillation,
    edge_of_stability,
    heavy_tail,
    spikes,
    dominant,
    depth,
    dead,
    clip_tight,
    clip_idle,
    noise_scale,
    straggler,
)


def find(run: Run) -> list[Finding]:
    """All that the run shows, what explains most first."""
    found = [finding for test in TABLE if (finding := test(run)) is not None]
    return sorted(found, key=lambda finding: -finding.weight)
