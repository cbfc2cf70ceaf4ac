"""What several ranks show that one does not."""

import dataclasses
import math

import pytest

from gradrein.watch.analysis.findings import find
from gradrein.watch.run.merge import merge_ranks

from .runs import NAMES, apart, late, left_out, ranks, starved


def the(name, run):
    return next(finding for finding in find(run) if finding.name == name)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_ranks_that_train_together_show_nothing(count, seed):
    assert find(merge_ranks(ranks(count, seed=seed))) == []


def test_the_late_rank_is_named_with_what_it_costs():
    found = the("straggler", late(4, which=2))
    assert found.title.startswith("rank 2 is late: the others wait 0.0")
    outside = found.evidence["seconds outside backward"]
    assert outside["rank 2"] == pytest.approx(0.04, rel=0.1)
    assert outside["rank 0"] == pytest.approx(0.01, rel=0.1)
    assert found.evidence["seconds in backward, with waiting"]["rank 2"] == pytest.approx(0.02, rel=0.1)


def test_several_late_ranks_are_named():
    found = ranks(6)
    for run in found:
        column = run.host_s if run.rank in (1, 4) else run.backward_s
        column[:] = [v + 0.03 for v in column]
    assert the("straggler", merge_ranks(found)).title.startswith("rank 1 and rank 4 are late")


def test_with_shards_only_loading_shows_which_rank_is_late():
    found = the("straggler", starved())
    assert found.title.startswith("rank 0 is late")
    assert found.criterion.startswith("seconds loading data")


def only_sometimes(found):
    for t in range(0, 400, 10):  # it saves a checkpoint, say
        found[0].host_s[t] += 1.0


def nobody_waits(found):
    found[1].host_s[:] = [v + 0.03 for v in found[1].host_s]
    found[1].backward_s[:] = [v + 0.001 for v in found[1].backward_s]


def only_a_little(found):
    found[1].host_s[:] = [v + 0.002 for v in found[1].host_s]


def with_shards(found):
    for run in found:
        run.shards[0] = [run.rank, 2]
    found[1].host_s[:] = [v + 0.03 for v in found[1].host_s]
    found[0].backward_s[:] = [v + 0.03 for v in found[0].backward_s]


def untimed(found):
    found[1].host_s[:] = [math.nan] * 400


@pytest.mark.parametrize("change", [only_sometimes, nobody_waits, only_a_little, with_shards, untimed])
def test_nobody_is_called_late_without_need(change):
    found = ranks(2)
    change(found)
    assert "straggler" not in {finding.name for finding in find(merge_ranks(found))}


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
