"""A policy by its name: built once for an optimizer, and once for the parameters of a call."""

import copy
import gc

import pytest
import torch

import gradrein
from gradrein.errors import ArgumentError
from gradrein.policies import ByMedian, ByOvershoot, named


@pytest.fixture(autouse=True)
def _nothing_is_left_over():
    gc.collect()
    before = set(named._kept)
    yield
    gc.collect()
    assert set(named._kept) <= before


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def train(net, policy, steps=30):
    """Return the norm after clipping of every step."""
    optimizer, found = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9), []
    rng = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(8, 4, generator=rng)).pow(2).mean().backward()
        found.append(gradrein.clip_(net, policy).norm_after)
        optimizer.step()
    return found


@pytest.mark.parametrize(("name", "make"), [("auto", ByOvershoot), ("median", ByMedian)])
def test_a_name_in_the_loop_learns_like_an_object_before_it(name, make):
    assert train(model(), name) == train(model(), make())


def test_two_models_do_not_share_a_memory():
    one, two = model(), model(1)
    alone = train(copy.deepcopy(one), "auto"), train(copy.deepcopy(two), "auto")
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9) for net in (one, two)]
    rngs, found = [torch.Generator().manual_seed(1) for _ in range(2)], ([], [])
    for _ in range(30):  # in turns
        for net, optimizer, rng, norms in zip((one, two), optimizers, rngs, found, strict=True):
            optimizer.zero_grad()
            net(torch.randn(8, 4, generator=rng)).pow(2).mean().backward()
            norms.append(gradrein.clip_(net, "auto").norm_after)
            optimizer.step()
    assert found == alone


def test_the_memory_ends_with_the_parameters():
    net = model()
    train(net, "auto", steps=2)
    assert any(key[0] == "auto" for key in named._kept)
    ids = {id(p) for p in net.parameters()}
    del net
    gc.collect()
    assert not any(ids & set(key[2]) for key in named._kept)


def test_a_name_in_a_mapping():
    net = model()
    by_name = train(copy.deepcopy(net), {"0.*": "median", "*": "auto"})
    assert by_name == train(copy.deepcopy(net), {"0.*": ByMedian(), "*": ByOvershoot()})


def test_sets_that_change_are_pointed_out():
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(7)]
    for w in weights:
        w.grad = torch.ones(1)
    for n in range(1, 5):
        gradrein.clip_(weights[:n], "auto")
    with pytest.warns(gradrein.errors.GradreinWarning, match="more than 4 sets"):
        gradrein.clip_(weights[:5], "auto")
    assert sum(key[2][0] == id(weights[0]) for key in named._kept) == 4


def test_a_clipper_by_name():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    clipper = gradrein.Clipper(optimizer, "auto")
    assert isinstance(clipper.policy, ByOvershoot)
    clipper.remove()
    assert isinstance(gradrein.Clipper(optimizer, {"*": "median"}, model=net).policy["*"], ByMedian)
    assert "*" in clipper.state_dict()


@pytest.mark.parametrize("call", [lambda w: gradrein.clip_([w], "autom"), lambda w: gradrein.Monitor(clip="autom")])
def test_an_unknown_name(call):
    w = torch.nn.Parameter(torch.ones(1))
    w.grad = torch.ones(1)
    with pytest.raises(ArgumentError, match=r"no policy is called 'autom'. Pass one of auto, "):
        call(w)
    assert w.grad.item() == 1.0


def test_every_name_is_a_policy():
    for name in named._NAMES:
        assert isinstance(named.build(name), gradrein.policies.Policy)
