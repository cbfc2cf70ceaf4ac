"""The same numbers as one process, whatever the layout."""

import math

import layouts
import pytest
import shared_memory
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

ORDERS = [1.0, 2.0, 3.5, math.inf]


def tensors(*rows):
    return {"seed": 5, "tensors": [(shape, where, letters, missing) for shape, where, letters, missing in rows]}


# What a parallel program has, by the name people give it. Rows: shape, mesh, placement by mesh dimension, ranks
# without a gradient.
TWO = {
    "ddp": tensors(((4, 3), "plain", "", ()), ((3,), "plain", "", ())),
    "fsdp": tensors(((4, 3), "line", "0", ()), ((6,), "line", "0", ())),
    "uneven": tensors(((5, 3), "line", "0", ()), ((3, 7), "line", "1", ())),
    "empty shard": tensors(((1, 3), "line", "0", ()), ((1,), "line", "0", ())),
    "replicated": tensors(((4, 3), "line", "r", ()), ((3,), "line", "0", ())),
    "partial": tensors(((4, 3), "line", "p", ()), ((3,), "line", "a", ())),
    "dtensor and plain": tensors(((4, 3), "line", "0", ()), ((3,), "plain", "", ())),
    "two meshes": tensors(((4, 3), "line", "0", ()), ((4, 2), "reversed", "0", ()), ((2, 2), "1x2", "r1", ())),
    "a rank without a gradient": tensors(((4, 3), "line", "0", (1,)), ((3,), "plain", "", ())),
    "a rank without any gradient": tensors(((4, 3), "line", "0", (1,)), ((6,), "line", "0", (1,))),
    "no gradient anywhere": tensors(((4, 3), "line", "0", (0, 1)), ((6,), "line", "0", (0, 1))),
}
FOUR = {
    "fsdp": tensors(((9, 3), "line", "0", ()), ((2,), "line", "0", ())),
    "fsdp and tp": tensors(((8, 6), "2d", "01", ()), ((5, 6), "2d", "0r", ()), ((7,), "2d", "00", ())),
    "fsdp and tp in parts": tensors(((8, 6), "2d", "01", ()), ((5, 3), "2d/a", "0", ()), ((3,), "2d/b", "0", ())),
    "hsdp": tensors(((8, 6), "2d", "r0", ()), ((3,), "2d", "r0", ())),
    "three dimensions and a slice": tensors(((8, 6), "3d", "r01", ()), ((6, 2), "3d/ac", "01", ())),
    "experts on their own mesh": tensors(
        ((8, 6), "line", "0", ()), ((4, 3, 2), "2d", "10", ()), ((5,), "plain", "", ())
    ),
    "crossing meshes": tensors(
        ((8, 6), "crossed", "01", ()), ((8, 6), "turned", "r1", ()), ((6,), "turned/a", "0", ())
    ),
    "partial in one dimension": tensors(((8, 6), "2d", "0p", ()), ((8, 6), "2d", "p1", ()), ((4,), "2d", "ap", ())),
    "ranks without gradients": tensors(((8, 6), "2d", "01", (1, 2)), ((3,), "line", "0", (0, 1, 2))),
    "a copy without a gradient": tensors(((8, 6), "line", "r", (1, 2)), ((4,), "2d", "r0", (2, 3))),
}
TABLE = [pytest.param(2, case, id=f"2 ranks, {name}") for name, case in TWO.items()] + [
    pytest.param(4, case, id=f"4 ranks, {name}") for name, case in FOUR.items()
]


@pytest.mark.parametrize(("size", "case"), TABLE)
def test_norm_as_in_one_process(request, size, case):
    rank_processes = request.getfixturevalue("two" if size == 2 else "four")
    for p in ORDERS:
        for max_norm in (0.3, 1e6):
            rank_processes.run(layouts.check_norm, case, p, max_norm)


@pytest.mark.parametrize(("size", "case"), TABLE)
def test_policies_as_in_one_process(request, size, case):
    rank_processes = request.getfixturevalue("two" if size == 2 else "four")
    for p in (2.0, math.inf):
        rank_processes.run(layouts.check_policies, case, p)


# Rows as above, which of them the last shares its memory with, and whether it is a plain tensor.
SHARED = {
    "fsdp": (tensors(((4, 3), "line", "0", ()), ((2,), "line", "0", ()), ((4, 3), "line", "0", ())), "p0", False),
    "an empty shard": (
        tensors(((1, 3), "line", "0", ()), ((2,), "line", "0", ()), ((1, 3), "line", "0", ())),
        "p0",
        False,
    ),
    "shards beside a plain tensor": (
        tensors(((5, 3), "line", "0", ()), ((2,), "plain", "", ()), ((5, 3), "line", "0", ())),
        "p0",
        False,
    ),
    "copies": (tensors(((4, 3), "line", "r", ()), ((4,), "line", "0", ()), ((4, 3), "line", "r", ())), "p0", False),
    "a copy and a plain tensor": (
        tensors(((4, 3), "line", "r", ()), ((4,), "line", "0", ()), ((4, 3), "plain", "", ())),
        "p0",
        True,
    ),
    "partial": (tensors(((4, 3), "line", "p", ()), ((4,), "line", "0", ()), ((4, 3), "line", "p", ())), "p0", False),
    "copies of shards": (
        tensors(((4, 3), "1x2", "r1", ()), ((4,), "line", "0", ()), ((4, 3), "1x2", "r1", ())),
        "p0",
        False,
    ),
}


@pytest.mark.parametrize(("case", "shared", "as_plain"), SHARED.values(), ids=SHARED)
def test_memory_that_gradients_share_counts_once(two, case, shared, as_plain):
    two.run(shared_memory.counts_once, case, shared, as_plain)


def test_memory_shared_on_one_rank(two):
    two.run(shared_memory.copies_shared_on_one_rank, *SHARED["copies"][:2])


def test_memory_that_is_shard_and_copy_is_refused(two):
    for rows in (2, 1):
        two.run(shared_memory.refused, rows)


def test_memory_that_is_partial_and_something_else_is_refused(two):
    for kind in (None, Replicate(), Shard(0)):
        two.run(shared_memory.partial_refused, kind)
        two.run(shared_memory.partial_refused, kind, 1)


@st.composite
def any_case(draw, size):
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
        where = draw(st.sampled_from(["plain", *layouts.MESHES[size]]))
        dims = 0 if where == "plain" else layouts.depth(size, where)
        letters = "".join(draw(st.sampled_from(["r", "p", *map(str, range(len(shape)))])) for _ in range(dims))
        # A rank that lacks the gradient of a copy is in the table; of a slice of a mesh only its own ranks know.
        lacks = where != "plain" and "/" not in where and not set("rp") & set(letters)
        missing = tuple(draw(st.sets(st.integers(0, size - 1)))) if lacks else ()
        rows.append((tuple(shape), where, letters, missing))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    dtype = torch.float32 if any("p" in row[2] for row in rows) and dtype == torch.bfloat16 else dtype
    return {"seed": draw(st.integers(0, 99)), "tensors": rows, "dtype": dtype}


# No shrinking: a layout that fails may leave ranks waiting for each other, and trying again would take minutes.
RANDOM = settings(
    max_examples=40,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@RANDOM
@given(case=any_case(4), p=st.sampled_from([*ORDERS, 0.5]))
def test_any_layout_on_four(four, case, p):
    four.run(layouts.check_norm, case, p, 0.5)


@RANDOM
@given(case=any_case(2), p=st.sampled_from([*ORDERS, 0.5]))
def test_any_layout_on_two(two, case, p):
    two.run(layouts.check_norm, case, p, 0.5)


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_a_short_message_is_what_an_all_reduce_makes_of_it(request, ranks):
    group = request.getfixturevalue(ranks)
    for seed, count in enumerate((1, 2, 17, 41, 1023, 1024, 1025)):
        group.run(layouts.exchanged_as_reduced, count, seed)
        if count <= 1024:  # of a longer one the maximum of gloo may lose it
            group.run(layouts.told_of_a_nan, count)


def test_a_short_message_among_few_ranks_is_sent_each_to_each(four):
    assert four.run(layouts.sent_each_to_each, 1024) == [[4 * 8192]] * 4
    assert four.run(layouts.sent_each_to_each, 1025) == [[]] * 4
