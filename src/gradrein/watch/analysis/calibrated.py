"""Written by `make calibrate` from random training runs; do not edit. See `benchmarks/random_runs`."""

MEASURED: dict[str, float] = {
    "tasks": 600,
    "false alarms": 0.04,
    "heard with a test loss": 0.718,
    "heard without": 0.36,
}
# What each sign of a run weighs, and the sum from which a report speaks
WEIGHTS: dict[str, dict[str, float]] = {
    "with a test loss": {
        "gradient norms, largest over usual": 1.26,
        "steps that overshoot": 0.338,
        "test loss, end over lowest": 6.43,
        "test loss, height above the lowest so far": 2.92,
        "training loss, end over lowest": 0.0665,
        "training loss, height above the lowest so far": 0.77,
    },
    "without": {
        "gradient norms, largest over usual": 1.11,
        "steps that overshoot": 1.15,
        "training loss, end over lowest": 0.526,
        "training loss, height above the lowest so far": 0.284,
    },
}
LIMITS: dict[str, float] = {
    "with a test loss": 3.84,
    "without": 3.13,
}
# What to change first, by the kind of optimizer and whether the run stays finite: the change, in how many
# runs that needed help it ended at least a third lower, and of how many
HELPED: dict[str, list[tuple[str, int, int]]] = {
    "plain, finite": [
        ("auto, lr 1/3", 51, 79),
        ("lr 1/10", 58, 79),
        ("auto", 47, 79),
        ("clip 1/3", 56, 79),
        ("lr 1/3", 47, 79),
        ("clip 1", 42, 79),
    ],
    "plain, not finite": [
        ("auto, lr 1/3", 99, 136),
        ("lr 1/10", 67, 136),
        ("auto", 69, 136),
        ("clip 1/3", 78, 136),
        ("clip 1", 68, 136),
        ("lr 1/3", 28, 136),
    ],
    "adaptive, finite": [
        ("clip 1/3", 86, 190),
        ("clip 1", 72, 190),
        ("auto, lr 1/3", 90, 190),
        ("auto", 36, 190),
        ("lr 1/10", 107, 190),
        ("lr 1/3", 88, 190),
    ],
    "adaptive, not finite": [
        ("auto, lr 1/3", 0, 0),
        ("lr 1/10", 0, 0),
        ("auto", 0, 0),
        ("clip 1/3", 0, 0),
        ("clip 1", 0, 0),
        ("lr 1/3", 0, 0),
    ],
}
