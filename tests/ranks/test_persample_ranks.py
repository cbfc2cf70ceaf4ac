"""Per-sample gradients of samples that lie on several ranks: what one process gives, or refused by name."""

import pytest
import splitting

FOUR_ONLY = ("hsdp", "hsdp, checkpoint", "fsdp, in two steps", "fsdp, odd, checkpoint, in two steps")


@pytest.mark.parametrize("wrapped", [name for name in splitting.WRAPPED if name not in FOUR_ONLY])
def test_the_same_as_one_process(two, wrapped):
    two.run(splitting.same_as_one_process, wrapped, "uneven")


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp", *FOUR_ONLY])
def test_the_same_as_one_process_over_four(four, wrapped):
    four.run(splitting.same_as_one_process, wrapped, "uneven")


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp"])
@pytest.mark.parametrize("sizes", ["empty", "none but one", "several digits"])
def test_ranks_with_few_samples_or_none(ranks, wrapped, sizes):
    ranks.run(splitting.same_as_one_process, wrapped, sizes)


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp", "fsdp, odd"])
@pytest.mark.parametrize(
    "case", [splitting.noise, splitting.scaled, splitting.statistics], ids=lambda case: case.__name__
)
def test_noise_scale_and_statistics(ranks, case, wrapped):
    ranks.run(case, wrapped)


@pytest.mark.parametrize(
    "case",
    [
        splitting.used_on_one_rank,
        splitting.frozen,
        splitting.half,
        splitting.other_ways_to_say_it,
        splitting.static_graph,
        splitting.without_sync,
        splitting.whole_groups,
        splitting.asked_too_late,
        splitting.refusals,
        splitting.disagreements,
        splitting.collectives,
        splitting.several_messages,
    ],
    ids=lambda case: case.__name__,
)
def test_case(ranks, case):
    ranks.run(case)


@pytest.mark.parametrize("wrapped", ["ddp", "ddp, finds unused", "fsdp", "fsdp, one for all"])
def test_owners_are_known(two, wrapped):
    two.run(splitting.owners_are_known, wrapped)


def test_two_meshes(four):
    four.run(splitting.two_meshes)


def test_pending_micro_batches(two):
    two.run(splitting.pending, "fsdp")


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp"])
@pytest.mark.parametrize("fault", ["killed", "raised"])
def test_the_others_stop_with_an_error_and_whole_gradients(doomed, wrapped, fault):
    answers = doomed.outcomes(splitting.clip_or_error, wrapped, fault)
    if fault == "killed":
        assert answers[1] == (False, "gone")
    else:
        assert answers[1][1][0] == "NoGraphError"
    for rank in (0, 2):
        ok, (kind, text, seconds, untouched) = answers[rank]
        assert ok
        assert kind == "RankError", text
        assert "look at the first error among their logs" in text
        assert seconds < 3 * doomed.timeout
        assert untouched
