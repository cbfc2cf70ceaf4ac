"""What `make calibrate` has found in random training runs (`benchmarks/random_runs`): `calibrated.json`, not edited."""

import json
from pathlib import Path
from typing import TypeAlias

_found = json.loads(Path(__file__).with_suffix(".json").read_text())

TASKS: int = _found["tasks"]
# What each sign of a run weighs by each rule, where the sum starts, and from which sum on a report speaks
WEIGHTS: dict[str, dict[str, float]] = _found["weights"]
STARTS: dict[str, float] = _found["starts"]
LIMIT: float = _found["limit"]
Leaf: TypeAlias = tuple[list[tuple[str, int, float]], list[tuple[str, int, int, int, int]]]
# What to change, by the kind of optimizer, then by signs that are above (1) or not above (-1) a number: the changes,
# the best first and then what adds most to those before; in how many runs of how many that needed help it ended at
# least a third lower, and in how many of all that were spoken of a quarter higher
ADVICE: dict[str, list[Leaf]] = _found["advice"]
