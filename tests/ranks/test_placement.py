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


@pytest.mark.parametrize(
    ("case", "kind", "says"),
    [
        (
            placements.copies_that_differ,
            "RankError",
            r"ranks [0, 1] hold different numbers of parameters under one Replicated",
        ),
        (placements.rms_of_plain_pieces, "UnsupportedGradientError", "w is Sharded by `placement`"),
        (placements.units_of_pieces, "UnsupportedGradientError", "that of w is Sharded by `placement`"),
        (
            placements.not_a_placement,
            "ArgumentError",
            "`placement` is Disjoint(group), Sharded(group) or Replicated(group)",
        ),
        (placements.no_names, "ArgumentError", "name patterns in `placement` need names"),
        (placements.no_pattern, "ArgumentError", "no pattern of `placement` matches the parameter 'w'"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refused_on_every_rank(two, case, kind, says):
    for found, text in two.run(case):
        assert found == kind
        assert says in text
