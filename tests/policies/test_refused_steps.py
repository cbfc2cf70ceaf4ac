"""A step that is refused, and one with no gradient at all, leave what a policy has learned; so does a damaged state."""

import copy

import pytest
import torch

import gradrein
from gradrein.errors import ArgumentError
from gradrein.policies import ByOvershoot


def clip(policy, weight, gradient, moved=0.0, nonfinite="skip"):
    weight.data.add_(moved)
    weight.grad = torch.tensor([gradient])
    return gradrein.clip_([weight], policy, nonfinite=nonfinite).norm_after


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_overshoot_compares_with_the_last_good_step(bad):
    found = []
    for between in ([], [bad], [bad, bad]):
        policy, weight = ByOvershoot(rate=1.0), torch.nn.Parameter(torch.zeros(1))
        clip(policy, weight, 1.0)
        weight.data.add_(1.0)
        for gradient in between:
            clip(policy, weight, gradient)
        found.append(clip(policy, weight, 1.0))
    assert found == [found[0]] * 3


@pytest.mark.parametrize("damage", ["missing", "empty", "number", "text"])
def test_a_damaged_state_is_refused_whole(damage):
    policy, weight, key = ByOvershoot(), torch.nn.Parameter(torch.zeros(3)), "average"
    for size in (1.0, 2.0):
        weight.grad = torch.full((3,), size)
        gradrein.clip_([weight], policy)
    saved = policy.state_dict()
    damaged = copy.deepcopy(saved)
    if damage == "missing":
        del damaged[key]
    elif damage == "text":
        damaged[key]["values"] = dict.fromkeys(damaged[key]["values"], "nothing")
    else:
        damaged[key] = {} if damage == "empty" else 5
    other = ByOvershoot()
    with pytest.raises(ArgumentError, match="damaged"):
        other.load_state_dict(damaged)
    assert str(other.state_dict()) == str(ByOvershoot().state_dict())
