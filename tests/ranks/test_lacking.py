"""Some ranks lack a gradient, or hold one that others cannot know of: the same number on all, or an error on all."""

import lacking
import pytest
from torch.distributed.tensor import Replicate, Shard

from gradrein import policies


@pytest.mark.parametrize("kind", [Replicate(), Shard(0)], ids=str)
@pytest.mark.parametrize(("sliced", "ranks"), [("tp", (0, 1)), ("tp", (3,)), ("stage", (1, 3)), ("stage", (0,))])
def test_a_gradient_of_a_slice_that_some_ranks_lack(four, kind, sliced, ranks):
    four.run(lacking.on_a_slice, kind, sliced, ranks)


@pytest.mark.parametrize("what", ["missing", "nan"])
def test_a_gradient_of_a_slice_beside_placements(four, what):
    four.run(lacking.on_a_slice_of_a_stage, what)


@pytest.mark.parametrize("what", ["missing", "nan", "limit"])
def test_slices_that_cross(four, what):
    four.run(lacking.on_two_slices, what)


def test_experts_on_some_ranks(four):
    four.run(lacking.experts_on_some_ranks)


def test_a_frozen_parameter_of_one_stage(two):
    two.run(lacking.a_frozen_parameter_of_one_stage)


@pytest.mark.parametrize("order", [("copies", "stages"), ("stages", "copies")])
def test_a_copy_that_one_stage_lacks(four, order):
    four.run(lacking.a_copy_that_one_stage_lacks, order)


def test_a_state_after_a_step_without_a_gradient(two):
    two.run(lacking.a_state_after_a_step_without_a_gradient)


def test_a_summand_that_is_only_scaled(two):
    two.run(lacking.a_summand_that_is_only_scaled)


def test_a_gradient_of_a_slice_that_all_ranks_lack(four):
    for kind in (Replicate(), Shard(0)):
        for sliced in ("tp", "stage"):
            four.run(lacking.on_no_rank_of_any_slice, kind, sliced)


@pytest.mark.parametrize("name", lacking.COPIES)
def test_all_ranks_hear_of_a_value_in_one_copy(four, name):
    for at in (0, 3):
        four.run(lacking.a_nan_in_one_copy, name, at)


def test_a_value_in_all_copies_is_zeroed(four):
    four.run(lacking.a_nan_in_all_copies)


@pytest.mark.parametrize("name", lacking.LEARN)
def test_a_copy_without_a_gradient_and_a_policy_that_learns_from_it(two, name):
    two.run(lacking.a_placed_copy, name, (1,))
    two.run(lacking.a_placed_copy, name, (0, 1))


@pytest.mark.parametrize("policy", [policies.ByOvershoot, policies.ByElementSpike, policies.ByRunningNorm])
def test_a_parameter_that_no_rank_has_a_gradient_for(two, policy):
    two.run(lacking.one_that_nobody_has, policy)


@pytest.mark.parametrize("name", lacking.EMPTY)
def test_a_group_without_gradients(two, name):
    two.run(lacking.a_group_without_gradients, name, False)
    two.run(lacking.a_group_without_gradients, name, True)


def test_placements_over_the_same_ranks(four):
    four.run(lacking.overlapping)


@pytest.mark.parametrize("call", lacking.CALLS)
def test_a_summand_that_cannot_be_written(two, call):
    for kind in lacking.SUMMANDS:
        for odd in (None, 0, 1):
            two.run(lacking.a_summand_that_cannot_be_written, kind, call, odd)
    two.run(lacking.a_summand_from_inference_mode, call)


@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (-2, -1), (0, 1, 2)])
def test_elements_as_units(two, dims):
    for letter in "01":
        two.run(lacking.elements_as_units, dims, letter)


@pytest.mark.parametrize("call", ["clip_grad_value_", "clip_grads_with_norm_"])
def test_copies_that_would_be_limited_to_different_values(two, call):
    two.run(lacking.another_limit, call)
