"""The latest numbers of a monitor, under the names that trackers show."""


def named(latest: dict[str, float], prefix: str) -> tuple[int, dict[str, float]]:
    """Return the step and its numbers by name. Those of a second optimizer have names of their own: `opt1/norm`.

    What gradients were multiplied by is the `clip_factor`: a bare `clip` of 1 reads as "clipped", and means that not.
    """
    opt = int(latest.get("opt", 0))
    within = f"{prefix}opt{opt}/" if opt else prefix
    numbers = {"clip_factor" if k == "clip" else k: v for k, v in latest.items() if k not in ("step", "opt")}
    return int(latest.get("step", 0)), {f"{within}{k}": v for k, v in numbers.items()}
