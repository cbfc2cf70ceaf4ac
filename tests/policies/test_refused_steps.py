"""A step that is refused, and one with no gradient at all, leave what a policy has learned; so does a damaged state."""

import copy

import pytest
import torch

import gradrein
from gradrein.errors import ArgumentError
from gradrein.policies import ByElementSpike, ByOvershoot


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


def test_element_spike_does_not_learn_from_zeros():
    policy, weight = ByElementSpike(theta=4.0, decay=0.9, warmup=3), torch.nn.Parameter(torch.zeros(1))
    for gradient in [1.0] * 5 + [0.0] * 50:
        clip(policy, weight, gradient)
    assert clip(policy, weight, 1.0) == 1.0
    policy = ByElementSpike(theta=4.0, warmup=3)
    for gradient in (0.0, 0.0, 0.0, 1e-3):
        clip(policy, weight, gradient)
    assert clip(policy, weight, 1.0) == 1.0  # one step is no history


@pytest.mark.parametrize("policy", [ByOvershoot(), ByElementSpike()], ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("damage", ["missing", "empty", "number", "text"])
def test_a_damaged_state_is_refused_whole(policy, damage):
    weight, key = torch.nn.Parameter(torch.zeros(3)), "average" if isinstance(policy, ByOvershoot) else "corrected_rms"
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
    other = type(policy)()
    with pytest.raises(ArgumentError, match="damaged"):
        other.load_state_dict(damaged)
    assert str(other.state_dict()) == str(type(policy)().state_dict())
