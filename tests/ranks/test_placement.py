"""`placement=`: where plain tensors are."""

import math

import placements
import pytest


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("case", [placements.stages, placements.tied, placements.sharded])
def test_as_in_one_process(ranks, case, p):
    ranks.run(case, p)


@pytest.mark.parametrize("case", [placements.sharded_and_staged, placements.dtensors_in_stages])
def test_pieces_and_stages_at_once(four, case):
    four.run(case)


def test_dtensors_beside_experts_count_once(ranks):
    ranks.run(placements.dtensor_beside_experts)


TWICE = "`placement` is Disjoint over ranks [0, 1] for a DTensor on ranks [0, 1]"
SHARED = "are in the same memory on this rank"
PARAMETERS = "do not agree on the parameters"
REFUSED = [  # what is run with what, and what every rank raises
    (placements.dtensor_counted_twice, "0", "ArgumentError", TWICE),
    (placements.dtensor_counted_twice, "r", "ArgumentError", TWICE),
    (placements.placed_twice, "tensor", "UnsupportedGradientError", SHARED),
    (placements.placed_twice, "views", "UnsupportedGradientError", SHARED),
    (placements.copies_that_differ, "number", "RankError", PARAMETERS),
    (placements.copies_that_differ, "shape", "RankError", PARAMETERS),
    (placements.other_placements, [(True, True), (True, False)], "RankError", "do not agree on "),
    (placements.other_placements, [(True, False), (False, True)], "RankError", "do not agree on "),
    (placements.factors_in_stages, None, "ArgumentError", "factors that are not known on this rank"),
    (placements.not_a_placement, None, "ArgumentError", "`placement` is Disjoint(group) of gradrein.distributed"),
    (placements.no_names, None, "ArgumentError", "name patterns in `placement` need names"),
    (placements.no_pattern, None, "ArgumentError", "no pattern of `placement` matches the parameter 'w'"),
]


@pytest.mark.parametrize(("case", "given", "kind", "says"), REFUSED)
def test_refused_on_every_rank(two, case, given, kind, says):
    for found, text in two.run(case, *([] if given is None else [given])):
        assert found == kind
        assert says in text
