"""`Reduction` and `Agreement`: values of which ranks hold parts."""

import math

import pytest
import reductions
import torch

from gradrein.distributed import Agreement, Layout, Reduction


def test_each_entry_over_its_layout(four):
    four.run(reductions.over_layouts)


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.5, 50.0, math.inf])
def test_norms_of_parts(four, p):
    four.run(reductions.norms, [1.0, 0.0, 1e30, 1e-30] * 300, p, False)
    four.run(reductions.norms, [1.0, 1e200, 1e-200, 0.0], p, True)


@pytest.mark.parametrize("at", [0, 3])
def test_another_call_is_refused_on_all_ranks(four, at):
    for text in four.run(reductions.another_call, at):
        assert "do not agree on the call: " in text
        assert "another on rank" in text
        assert "No gradient was changed" in text


@pytest.mark.parametrize("at", [0, 3])
def test_other_sizes_are_refused_on_all_ranks(four, at):
    for text in four.run(reductions.other_sizes, at):
        assert "do not agree on the number of values: " in text


@pytest.mark.parametrize("at", [1, 3])
def test_copies_that_differ_are_refused_on_all_ranks(four, at):
    assert all("copies differ" in text for text in four.run(reductions.other_copies, at))


def test_identity_in_one_process():
    reduction = Reduction([], Agreement("values", {"the call": "a call"}))
    values = torch.tensor([1e300, -2.0, math.inf], dtype=torch.float64)
    for found in (
        reduction.sum(values),
        reduction.max(values),
        reduction.norms(values.abs(), [2.0] * 3, [Layout()] * 3) * values.sign(),
    ):
        assert torch.equal(found, values)
