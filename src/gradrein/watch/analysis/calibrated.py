"""Written by `make calibrate` from random training runs; do not edit. See `benchmarks/random_runs`."""

MEASURED: dict[str, float] = {
    "tasks": 80,
    "false alarms": 0.04,
    "heard with a test loss": 0.385,
    "heard without": 0.0769,
}
# What each sign of a run weighs, and the sum from which a report speaks
WEIGHTS: dict[str, dict[str, float]] = {
    "with a test loss": {
        "gradient norms, largest over usual": 1.68,
        "steps that overshoot": 2.48,
        "test loss, end over lowest": 2.55,
        "test loss, height above the lowest so far": 1.42,
        "training loss, end over lowest": 0.997,
        "training loss, height above the lowest so far": 0.054,
    },
    "without": {
        "gradient norms, largest over usual": 0.915,
        "steps that overshoot": 4.27,
        "training loss, end over lowest": 0.159,
    },
}
LIMITS: dict[str, float] = {
    "with a test loss": 5.39,
    "without": 5.55,
}
# What to change first, by the kind of optimizer and whether the run stays finite: the change, in how many
# runs that needed help it ended at least a third lower, and of how many
HELPED: dict[str, list[tuple[str, int, int]]] = {
    "plain, finite": [
        ("auto, lr 1/3", 9, 15),
        ("auto", 7, 15),
        ("lr 1/10", 9, 15),
        ("clip 1/3", 7, 15),
        ("lr 1/3", 10, 15),
        ("clip 1", 6, 15),
    ],
    "plain, not finite": [
        ("auto, lr 1/3", 11, 13),
        ("auto", 6, 13),
        ("lr 1/10", 5, 13),
        ("lr 1/3", 3, 13),
        ("clip 1/3", 6, 13),
        ("clip 1", 6, 13),
    ],
    "adaptive, finite": [
        ("auto, lr 1/3", 4, 4),
        ("auto", 2, 4),
        ("lr 1/10", 3, 4),
        ("lr 1/3", 4, 4),
        ("clip 1/3", 0, 4),
        ("clip 1", 1, 4),
    ],
    "adaptive, not finite": [
        ("auto, lr 1/3", 0, 0),
        ("auto", 0, 0),
        ("lr 1/10", 0, 0),
        ("lr 1/3", 0, 0),
        ("clip 1/3", 0, 0),
        ("clip 1", 0, 0),
    ],
}
