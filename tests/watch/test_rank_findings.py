"""What several ranks show that one does not."""

import dataclasses
import math

import pytest

from gradrein.watch.analysis.findings import find
from gradrein.watch.run.merge import merge_ranks

from .runs import NAMES, apart, left_out, ranks


def the(name, run):
    return next(finding for finding in find(run) if finding.name == name)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_ranks_that_train_together_show_nothing(count, seed):
    assert find(merge_ranks(ranks(count, seed=seed))) == []


def test_ranks_that_never_exchange_are_found_not_to_be_wrapped():
    found = the("rank_norms", apart())
    assert "do not train together" in found.title
    assert found.evidence["parameters"] == NAMES
    assert found.evidence["first step"] == 0
    assert "Wrap it in DistributedDataParallel" in found.advice


@pytest.mark.parametrize(
    "value",
    [lambda v: 2 * v, lambda v: None, lambda v: math.nan, lambda v: v * 1.01],
    ids=["twice", "none", "nan", "1%"],
)
def test_a_gradient_that_is_not_exchanged_is_named_with_its_first_step(value):
    found = the("rank_norms", left_out(step=123, place=4, value=value))
    assert found.title == f"the gradient of {NAMES[4]} is not the same on all ranks, first at step 123"
    assert found.evidence["first step"] == 123
    assert set(found.evidence[f"norms of {NAMES[4]} there"]) == {"rank 0", "rank 1"}
    assert "no_sync" in found.advice


def rounded_differently(found):
    found[1].norms[:] = [[v * (1 + 1e-5) for v in row] for row in found[1].norms]


def noise_beside_the_rest(found):
    for run in found:
        for row in run.norms:
            row[3] = 1e-9 * (1 + run.rank)


def other_parameters(found):  # stages of a pipeline
    names = [f"later.{name}" for name in NAMES]
    found[1] = dataclasses.replace(found[1], names=names, norms=[[2 * v for v in row] for row in found[1].norms])


def pieces_that_differ(found):
    for run in found:
        run.shards[2] = [run.rank, 2]
        for row in run.norms:
            row[2] = 1.0 + run.rank


def without_a_gradient_on_both(found):
    for run in found:
        for row in run.norms[:40]:
            row[3] = None


@pytest.mark.parametrize(
    "change",
    [rounded_differently, noise_beside_the_rest, other_parameters, pieces_that_differ, without_a_gradient_on_both],
)
def test_what_may_differ_is_not_found(change):
    found = ranks(2)
    change(found)
    assert "rank_norms" not in {finding.name for finding in find(merge_ranks(found))}


def test_copies_of_a_shard_have_to_be_equal():
    found = ranks(4)
    for run in found:
        run.shards[2] = [run.rank % 2, 2]  # ranks 0 and 2 hold one shard, 1 and 3 the other
        for row in run.norms:
            row[2] = 1.0 + run.rank % 2
    assert "rank_norms" not in {finding.name for finding in find(merge_ranks(found))}
    found[3].norms[50][2] = 3.0
    found = the("rank_norms", merge_ranks(found))
    assert found.evidence[f"norms of {NAMES[2]} there"] == {"rank 1": 2.0, "rank 3": 3.0}
    assert found.evidence["first step"] == 50
