"""A policy by its name: where an object keeps the state, and refused elsewhere."""

import pytest
import torch

import gradrein
from gradrein.errors import ArgumentError
from gradrein.policies import ByMedian, ByOvershoot, named


def test_a_clipper_by_name():
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    clipper = gradrein.Clipper(optimizer, "auto")
    assert isinstance(clipper.policy, ByOvershoot)
    assert "*" in clipper.state_dict()
    clipper.remove()
    by_pattern = gradrein.Clipper(optimizer, {"bias": None, "*": "median"}, model=net)
    assert isinstance(by_pattern.policy["*"], ByMedian)


@pytest.mark.parametrize("policy", ["auto", {"*": "auto"}])
def test_a_call_keeps_no_state_and_takes_no_name(policy):
    w = torch.nn.Parameter(torch.ones(1))
    w.grad = torch.full((1,), 5.0)
    with pytest.raises(ArgumentError, match=r"found the name 'auto': .* gradrein.Clipper\(optimizer, \"auto\"\)"):
        gradrein.clip_({"w": w}, policy)
    assert w.grad.item() == 5.0


def test_every_name_is_a_policy():
    for name in named._NAMES:
        assert isinstance(named.build(name), gradrein.policies.Policy)
