"""Policies that look inside gradients, on shards: the same as in one process."""

import learning
import pytest
from test_layouts import FOUR, TWO, tensors

MORE = {
    "columns cut": tensors(((5, 6), "line", "1", ()), ((3, 4, 5), "line", "2", ()), ((7,), "line", "0", ())),
    "rows and columns cut": tensors(((6, 6), "2d", "10", ()), ((5, 7), "2d", "1r", ())),
}
TABLE = [pytest.param(2, TWO[name], id=f"2 ranks, {name}") for name in ("fsdp", "empty shard", "partial")] + [
    pytest.param(4, case, id=f"4 ranks, {name}") for name, case in {**FOUR, **MORE}.items()
]


@pytest.mark.parametrize(("size", "case"), TABLE)
def test_as_in_one_process(request, size, case):
    crew = request.getfixturevalue("two" if size == 2 else "four")
    for name in learning.POLICIES:
        crew.run(learning.as_in_one_process, case, name)


def test_a_dry_run_says_the_same_and_changes_nothing(two):
    for name in learning.POLICIES:
        two.run(learning.as_in_one_process, TWO["uneven"], name, True)
