"""Some ranks lack a gradient, or hold one that others cannot know of: the same number on all, or an error on all."""

import missing_gradients as cases
import pytest
from torch.distributed.tensor import Partial, Replicate, Shard


@pytest.mark.parametrize("name", cases.LIES)
def test_a_gradient_that_some_ranks_lack(four, name):
    for call in cases.CALLS:
        four.run(cases.on_some_ranks, name, call, (3,))
    four.run(cases.on_some_ranks, name, "clip_grad_norm_", (0, 1))


@pytest.mark.parametrize("name", ["sharded", "replicated", "hybrid", "shards, then copies", "partial"])
def test_the_only_gradient(four, name):
    for missing in ((0,), (1, 2)):
        four.run(cases.on_some_ranks, name, "clip_grad_norm_", missing, False)


@pytest.mark.parametrize("name", cases.LIES)
def test_a_gradient_that_no_rank_has(four, name):
    four.run(cases.on_no_rank, name)


def test_copies_in_plain_tensors(ranks):
    for missing in ((), (1,), tuple(range(4))):
        ranks.run(cases.a_copy_beside_stages, missing[: ranks.size])


@pytest.mark.parametrize("name", ["by_unit", "ByMedian", "by_rms"])
def test_a_group_without_gradients(four, name):
    four.run(cases.a_group_without_gradients, name)


@pytest.mark.parametrize("call", cases.BY_ELEMENT)
def test_a_summand_is_not_changed_by_element(two, call):
    two.run(cases.a_summand_is_not_changed_by_element, call)


@pytest.mark.parametrize(
    "pair", [(Shard(0), Shard(0)), (Replicate(), None), (Shard(0), Replicate()), (Partial(), None)]
)
def test_dtensors_in_one_memory_are_refused(two, pair):
    for call in ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "by_value"):
        two.run(cases.shared_memory, *pair, call)


ONCE = [cases.crossing, cases.experts_on_some_ranks, cases.overlapping, cases.one_gradient_of_two_parameters]


@pytest.mark.parametrize("case", ONCE, ids=lambda case: case.__name__)
def test_case(four, case):
    four.run(case)
