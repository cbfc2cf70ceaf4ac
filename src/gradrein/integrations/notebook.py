"""A chart that is redrawn while training in a notebook: `Monitor(..., on_step=live_chart())`."""

import time
from collections.abc import Callable
from typing import Any

from .._notebook import card, curves
from ._missing import missing

try:
    from IPython.display import HTML, display
except ImportError as error:
    raise missing("ipython", "notebook") from error

_MOST_POINTS = 600


def live_chart(period: float = 0.5) -> Callable[[dict[str, float]], None]:
    """Return a function for `Monitor(on_step=...)` that draws loss and gradient norm below the cell.

    Args:
        period: Seconds between two updates.

    Returns:
        The function.
    """
    series: dict[str, _Series] = {}
    seen: dict[str, float] = {}
    handle: Any = None
    drawn = 0.0

    def on_step(latest: dict[str, float]) -> None:
        opt = int(latest.get("opt", 0))
        for name in ("loss", "norm"):
            if name in latest:
                label = f"{name} of optimizer {opt}" if opt else name
                series.setdefault(label, _Series()).add(latest["step"], latest[name])
        seen.update(latest)
        if not drawn or time.monotonic() - drawn >= period:
            draw()

    def draw() -> None:
        nonlocal handle, drawn
        if not seen:
            return
        step, loss, norm = int(seen["step"]), seen.get("loss", float("nan")), seen.get("norm", float("nan"))
        picture = curves([(label, one.points) for label, one in series.items()])
        shown = HTML(card(f"step {step}: loss {loss:.4g}, gradient norm {norm:.4g}", picture))
        if not drawn:
            handle = display(shown, display_id=True)
        elif handle is not None:  # outside of a notebook there is none
            handle.update(shown)
        drawn = time.monotonic()

    on_step.close = draw  # type: ignore[attr-defined]  # called when the monitor stops
    return on_step


class _Series:
    """Points of a run of any length: when there are too many, every other one is left out from there on."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._stride = 1
        self._count = 0

    def add(self, x: float, y: float) -> None:
        if self._count % self._stride == 0:
            self.points.append((x, y))
        self._count += 1
        if len(self.points) > _MOST_POINTS:
            self.points, self._stride = self.points[::2], 2 * self._stride
