"""Per-sample gradients of samples that lie on several ranks: what one process gives, or refused by name."""

import persample_cases
import pytest

FOUR_ONLY = ("hsdp", "hsdp, checkpoint", "fsdp, in two steps", "fsdp, odd, checkpoint, in two steps")


@pytest.mark.parametrize("wrapped", [name for name in persample_cases.WRAPPED if name not in FOUR_ONLY])
def test_the_same_as_one_process(two, wrapped):
    two.run(persample_cases.same_as_one_process, wrapped, "uneven")


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp", *FOUR_ONLY])
def test_the_same_as_one_process_over_four(four, wrapped):
    four.run(persample_cases.same_as_one_process, wrapped, "uneven")


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp"])
@pytest.mark.parametrize("sizes", ["empty", "none but one", "several digits"])
def test_ranks_with_few_samples_or_none(four, wrapped, sizes):
    four.run(persample_cases.same_as_one_process, wrapped, sizes)


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp", "fsdp, odd"])
@pytest.mark.parametrize("case", [persample_cases.scaled, persample_cases.statistics], ids=lambda case: case.__name__)
def test_scale_and_statistics(ranks, case, wrapped):
    ranks.run(case, wrapped)


@pytest.mark.parametrize(
    "case",
    [
        persample_cases.used_on_one_rank,
        persample_cases.frozen,
        persample_cases.half,
        persample_cases.other_ways_to_say_it,
        persample_cases.static_graph,
        persample_cases.without_sync,
        persample_cases.whole_groups,
        persample_cases.asked_too_late,
        persample_cases.refusals,
        persample_cases.disagreements,
        persample_cases.collectives,
        persample_cases.several_messages,
        persample_cases.tensor_parallel,
        persample_cases.pipeline,
    ],
    ids=lambda case: case.__name__,
)
def test_case(ranks, case):
    ranks.run(case)


@pytest.mark.parametrize("wrapped", ["ddp", "ddp, finds unused", "fsdp", "fsdp, one for all"])
def test_owners_are_known(two, wrapped):
    two.run(persample_cases.owners_are_known, wrapped)


def test_hooks(two):
    two.run(persample_cases.hooks)


def test_two_meshes(four):
    four.run(persample_cases.two_meshes)


def test_pending_micro_batches(two):
    two.run(persample_cases.pending, "fsdp")


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp"])
@pytest.mark.parametrize("fault", ["killed", "raised"])
def test_the_others_stop_with_an_error_and_whole_gradients(three, wrapped, fault):
    answers = three.outcomes(persample_cases.clip_or_error, wrapped, fault)
    if fault == "killed":
        assert answers[1] == (False, "gone")
    else:
        assert answers[1][1][0] == "NoGraphError"
    for rank in (0, 2):
        ok, (kind, text, seconds, untouched) = answers[rank]
        assert ok
        assert kind == "RankError", text
        assert "look at the first error in their logs" in text
        assert seconds < 3 * three.timeout
        assert untouched


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp", "fsdp, checkpoint"])
def test_projected_as_in_one_process(two, wrapped, tmp_path):
    two.run(persample_cases.projected, wrapped, str(tmp_path))
