"""Policies that look inside gradients, on shards: the same as in one process."""

import learning
import pytest
import torch
from test_layouts import FOUR, TWO, tensors

MORE = {
    "columns cut": tensors(((5, 6), "line", "1", ()), ((3, 4, 5), "line", "2", ()), ((7,), "line", "0", ())),
    "rows and columns cut": tensors(((6, 6), "2d", "10", ()), ((5, 7), "2d", "1r", ())),
}
TABLE = [pytest.param(2, TWO[name], id=f"2 ranks, {name}") for name in ("fsdp", "empty shard")] + [
    pytest.param(4, case, id=f"4 ranks, {name}") for name, case in {**FOUR, **MORE}.items() if "partial" not in name
]


@pytest.mark.parametrize(("size", "case"), TABLE)
def test_as_in_one_process(request, size, case):
    rank_processes = request.getfixturevalue("two" if size == 2 else "four")
    for name in learning.POLICIES:
        rank_processes.run(learning.as_in_one_process, case, name)


def test_a_dry_run_says_the_same_and_changes_nothing(two):
    for name in learning.POLICIES:
        two.run(learning.as_in_one_process, TWO["uneven"], name, True)


def assert_same_bits(found, expected):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same_bits(found[key], value)
    elif hasattr(expected, "shape"):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert found == expected


@pytest.mark.parametrize("name", learning.SAVED)
def test_state_goes_through_a_checkpoint_to_another_number_of_ranks(two, four, tmp_path, name):
    (state, after), *_ = four.run(learning.learn_and_save, name, str(tmp_path))
    for rank_processes in (two, four):
        for found, again in rank_processes.run(learning.load_and_go_on, name, str(tmp_path)):
            assert_same_bits(found, state)
            # The products of ByOvershoot are those of float32 shards, which another number of ranks adds up otherwise.
            assert again == pytest.approx(after, rel=1e-6 if name == "ByOvershoot" else 1e-12)
    kind, text = two.run(learning.load_without_a_step, name, str(tmp_path))[0]
    assert kind != "nothing", text
