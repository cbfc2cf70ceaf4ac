"""`placement=`: where plain tensors are."""

import math

import placements
import pytest


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize(
    "case", [placements.stages, placements.tied, placements.sharded], ids=lambda case: case.__name__
)
def test_as_in_one_process(ranks, case, p):
    ranks.run(case, p)


def test_pieces_and_stages_at_once(four):
    four.run(placements.sharded_and_staged)
    four.run(placements.dtensors_in_stages)


@pytest.mark.parametrize("letter", ["0", "r"])
def test_a_dtensor_that_would_count_once_for_each_rank_is_refused(two, letter):
    for found, text in two.run(placements.dtensor_counted_twice, letter):
        assert found == "ArgumentError"
        assert "`placement` is Disjoint over ranks [0, 1] for a DTensor on ranks [0, 1]" in text


def test_dtensors_beside_experts_count_once(ranks):
    ranks.run(placements.dtensor_beside_experts)


@pytest.mark.parametrize("kind", ["tensor", "views"])
def test_one_memory_under_two_placements_is_refused(two, kind):
    for found, text in two.run(placements.placed_twice, kind):
        assert found == "UnsupportedGradientError"
        assert "are in the same memory on this rank" in text


@pytest.mark.parametrize(
    ("case", "kind", "says"),
    [
        (placements.spikes_in_stages, "ArgumentError", "factors or limits that are not known on this rank"),
        (placements.not_a_placement, "ArgumentError", "`placement` is Disjoint(group) of gradrein.distributed"),
        (placements.no_names, "ArgumentError", "name patterns in `placement` need names"),
        (placements.no_pattern, "ArgumentError", "no pattern of `placement` matches the parameter 'w'"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refused_on_every_rank(two, case, kind, says):
    for found, text in two.run(case):
        assert found == kind
        assert says in text


@pytest.mark.parametrize("which", ["number", "shape"])
def test_copies_that_differ_are_refused_on_every_rank(two, which):
    for found, text in two.run(placements.copies_that_differ, which):
        assert found == "RankError"
        assert "do not agree on the parameters" in text


@pytest.mark.parametrize("kinds", [[(True, True), (True, False)], [(True, False), (False, True)]])
def test_another_placement_is_refused_on_every_rank(two, kinds):
    for found, text in two.run(placements.other_placements, kinds):
        assert found == "RankError"
        assert "do not agree on the parameters" in text or "do not agree on `placement`" in text
