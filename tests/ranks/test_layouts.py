"""The same numbers as one process, whatever the layout."""

import math

import layouts
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

ORDERS = [1.0, 2.0, 3.5, math.inf]


def tensors(*rows):
    return {"seed": 5, "tensors": [(shape, where, letters, missing) for shape, where, letters, missing in rows]}


# What a parallel program has, by the name people give it. Rows: shape, mesh, placement by mesh dimension, and all ranks
# where none has a gradient.
TWO = {
    "ddp": tensors(((4, 3), "plain", "", ()), ((3,), "plain", "", ())),
    "fsdp": tensors(((4, 3), "line", "0", ()), ((6,), "line", "0", ())),
    "uneven": tensors(((5, 3), "line", "0", ()), ((3, 7), "line", "1", ())),
    "empty shard": tensors(((1, 3), "line", "0", ()), ((1,), "line", "0", ())),
    "replicated": tensors(((4, 3), "line", "r", ()), ((3,), "line", "0", ())),
    "partial": tensors(((4, 3), "line", "p", ()), ((3,), "line", "a", ())),
    "dtensor and plain": tensors(((4, 3), "line", "0", ()), ((3,), "plain", "", ())),
    "two meshes": tensors(((4, 3), "line", "0", ()), ((4, 2), "reversed", "0", ()), ((2, 2), "1x2", "r1", ())),
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


@pytest.mark.needs("fully_shard on the CPU")
@pytest.mark.parametrize(
    ("ranks", "fsdp", "tensor_parallel"),
    [("two", "line", "1x2/b"), ("four", "line", "2d/b"), ("four", "2d", "2d/b")],
)
def test_a_model_on_several_meshes(request, ranks, fsdp, tensor_parallel):
    request.getfixturevalue(ranks).run(layouts.check_model_on_several_meshes, fsdp, tensor_parallel)


@pytest.mark.needs("fully_shard on the CPU")
@pytest.mark.parametrize(("ranks", "name"), [("two", "line"), ("two", "reversed"), ("four", "shuffled")])
def test_a_model_on_a_mesh_in_any_order(request, ranks, name):
    request.getfixturevalue(ranks).run(layouts.check_model_on_one_mesh, name)


@st.composite
def any_case(draw, size):
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
        where = draw(st.sampled_from(["plain", *layouts.MESHES[size]]))
        dims = 0 if where == "plain" else layouts.depth(size, where)
        letters = "".join(draw(st.sampled_from(["r", "p", *map(str, range(len(shape)))])) for _ in range(dims))
        missing = tuple(range(size)) if where != "plain" and draw(st.integers(0, 9)) == 0 else ()
        rows.append((tuple(shape), where, letters, missing))
    if any("/" in row[1] for row in rows):  # slices that cross are refused without a mesh of all ranks
        rows.append(((3,), "line", "0", ()))
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
