"""Written by `make calibrate` from random training runs; do not edit. See `benchmarks/random_runs`."""

MEASURED: dict[str, float] = {
    "tasks": 800,
    "false alarms": 0.035,
    "heard with a test loss": 0.835,
    "heard without": 0.603,
    "heard clipped": 0.137,
}
# What each sign of a run weighs, and the sum from which a report speaks
WEIGHTS: dict[str, dict[str, float]] = {
    "with a test loss": {
        "test loss, end over lowest": 9.88,
        "test loss, height above the lowest so far": 3.69,
        "test loss, still falling at the end": 4.72,
        "gradient norms, spread": 1.4,
        "gradients shrink under an optimizer like Adam": 1.05,
    },
    "without": {
        "training loss, height in the second half": 2.22,
        "gradients shrink under an optimizer like Adam": 0.783,
        "longest steps, of the weights": 1.46,
    },
    "clipped": {
        "test loss, end over lowest": 2.43,
        "training loss, height in the second half": 0.119,
    },
}
LIMITS: dict[str, float] = {
    "with a test loss": 5.72,
    "without": 5.89,
    "clipped": 2.49,
}
# What to change, by the kind of optimizer, then by signs that are above (1) or not above (-1) a number: the
# changes, the best first and then what adds most to those before; in how many runs of how many that needed
# help it ended at least a third lower, and in how many of all that were spoken of a quarter higher
Leaf = tuple[list[tuple[str, int, float]], list[tuple[str, int, int, int, int]]]
ADVICE: dict[str, list[Leaf]] = {
    "plain": [
        (
            [
                ("longest steps, of the weights", 1, 2.44),
                ("longest steps, of the weights", 1, 3.34),
            ],
            [
                ("auto, lr 1/3", 20, 21, 0, 26),
                ("clip 1/10, lr 1/10", 16, 21, 8, 26),
                ("clip 1", 15, 21, 0, 26),
                ("lr 1/30", 16, 21, 3, 26),
            ],
        ),
        (
            [
                ("longest steps, of the weights", 1, 2.44),
                ("longest steps, of the weights", -1, 3.34),
            ],
            [
                ("auto, lr 1/10", 35, 46, 6, 72),
                ("clip 1/3", 30, 46, 10, 72),
                ("lr 1/30", 33, 46, 11, 72),
                ("auto, lr 1/3", 25, 46, 5, 72),
            ],
        ),
        (
            [
                ("longest steps, of the weights", -1, 2.44),
            ],
            [
                ("auto", 6, 15, 0, 25),
                ("clip 1/3", 12, 15, 6, 25),
                ("clip 1/10", 9, 15, 12, 25),
                ("clip 1", 9, 15, 3, 25),
            ],
        ),
    ],
    "plain, not finite": [
        (
            [],
            [
                ("auto, lr 1/10", 172, 195, 0, 211),
                ("clip 1/10, lr 1/10", 158, 195, 0, 211),
                ("clip 1/10", 133, 195, 0, 211),
                ("lr 1/30", 133, 195, 0, 211),
            ],
        ),
    ],
    "adaptive": [
        (
            [
                ("test loss, end over lowest", 1, 0.33),
                ("gradients shrink under an optimizer like Adam", 1, 1.46),
            ],
            [
                ("lr 1/30", 56, 67, 5, 78),
                ("clip 1/10, lr 1/10", 39, 67, 15, 78),
                ("clip 1/3", 12, 67, 49, 78),
                ("auto, lr 1/10", 48, 67, 6, 78),
            ],
        ),
        (
            [
                ("test loss, end over lowest", 1, 0.33),
                ("gradients shrink under an optimizer like Adam", -1, 1.46),
            ],
            [
                ("clip 1/3, lr 1/3", 47, 68, 6, 79),
                ("lr 1/30", 43, 68, 16, 79),
                ("clip 1/10", 30, 68, 12, 79),
                ("clip 1/10, lr 1/10", 50, 68, 7, 79),
            ],
        ),
        (
            [
                ("test loss, end over lowest", -1, 0.33),
                ("longest steps, of the weights", 1, 2.77),
            ],
            [
                ("lr 1/3", 17, 24, 6, 33),
                ("clip 1/10, lr 1/10", 19, 24, 8, 33),
                ("clip 1/3", 8, 24, 16, 33),
                ("lr 1/10", 18, 24, 10, 33),
            ],
        ),
        (
            [
                ("test loss, end over lowest", -1, 0.33),
                ("longest steps, of the weights", -1, 2.77),
            ],
            [
                ("clip 1", 24, 45, 15, 97),
                ("lr 1/30", 11, 45, 59, 97),
                ("clip 1/10", 27, 45, 22, 97),
                ("clip 1, lr 1/3", 15, 45, 27, 97),
            ],
        ),
    ],
}
