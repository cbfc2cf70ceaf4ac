"""Written by `make calibrate` from random training runs; do not edit. See `benchmarks/random_runs`."""

MEASURED: dict[str, float] = {
    "tasks": 110,
    "false alarms": 0.04,
    "heard with a test loss": 0.739,
    "heard without": 0.16,
}
# What each sign of a run weighs, and the sum from which a report speaks
WEIGHTS: dict[str, dict[str, float]] = {
    "with a test loss": {
        "gradient norms, largest over usual": 1.37,
        "steps that overshoot": 1.85,
        "test loss, end over lowest": 4.34,
        "test loss, height above the lowest so far": 2.12,
        "training loss, end over lowest": 0.993,
        "training loss, height above the lowest so far": 0.15,
    },
    "without": {
        "gradient norms, largest over usual": 0.459,
        "steps that overshoot": 0.315,
        "training loss, end over lowest": 0.287,
        "training loss, height above the lowest so far": 0.145,
    },
}
LIMITS: dict[str, float] = {
    "with a test loss": 4.18,
    "without": 1.41,
}
# What to change first, by the kind of optimizer and whether the run stays finite: the change, in how many
# runs that needed help it ended at least a third lower, and of how many
HELPED: dict[str, list[tuple[str, int, int]]] = {
    "plain, finite": [
        ("auto, lr 1/3", 10, 19),
        ("auto", 9, 19),
        ("lr 1/10", 11, 19),
        ("clip 1/3", 9, 19),
        ("lr 1/3", 10, 19),
        ("clip 1", 8, 19),
    ],
    "plain, not finite": [
        ("auto, lr 1/3", 15, 17),
        ("auto", 10, 17),
        ("lr 1/10", 9, 17),
        ("lr 1/3", 7, 17),
        ("clip 1/3", 10, 17),
        ("clip 1", 10, 17),
    ],
    "adaptive, finite": [
        ("auto, lr 1/3", 12, 13),
        ("lr 1/10", 12, 13),
        ("auto", 2, 13),
        ("lr 1/3", 12, 13),
        ("clip 1/3", 1, 13),
        ("clip 1", 1, 13),
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
