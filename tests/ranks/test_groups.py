"""`groups=`: what tensors cannot say."""

import math

import marked
import pytest


@pytest.mark.parametrize("p", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("case", [marked.stages, marked.tied, marked.sharded], ids=lambda case: case.__name__)
def test_as_in_one_process(ranks, case, p):
    ranks.run(case, p)


def test_pieces_and_stages_at_once(four):
    four.run(marked.sharded_and_staged)
    four.run(marked.dtensors_in_stages)


@pytest.mark.parametrize(
    ("case", "kind", "says"),
    [
        (
            marked.copies_that_differ,
            "RankError",
            r"ranks [0, 1] hold different numbers of parameters under one Replicated",
        ),
        (marked.rms_of_plain_pieces, "UnsupportedGradientError", "w was said to be Sharded"),
        (marked.units_of_pieces, "UnsupportedGradientError", "that of p0 lies on several ranks"),
        (marked.not_a_mark, "ArgumentError", "`groups` says Stages(group), Sharded(group) or Replicated(group)"),
        (marked.no_names, "ArgumentError", "name patterns in `groups` need names"),
        (marked.no_pattern, "ArgumentError", "no pattern of `groups` matches the parameter 'w'"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_refused_on_every_rank(two, case, kind, says):
    for found, text in two.run(case):
        assert found == kind
        assert says in text
