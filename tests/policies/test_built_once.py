"""A policy with a memory that is built for every call never learns: the mistake is loud, and nothing else is."""

import copy
import gc
import pickle
import warnings

import pytest
import torch
from cases import ALL, gradient, parameter

import gradrein
from gradrein.errors import GradreinWarning
from gradrein.policies import ByMedian, ByZScore, SkipSpikes


def tensors_of(saved):
    """The tensors of a saved state, in order."""
    if isinstance(saved, dict):
        return [t for value in saved.values() for t in tensors_of(value)]
    return [saved] if isinstance(saved, torch.Tensor) else []


every_policy = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


def step(p, policy):
    p.grad = gradient(1.0)
    return gradrein.clip_([p], policy)


@every_policy
def test_built_in_the_loop(make):
    p = parameter()
    step(p, make())
    step(p, make())
    for _ in range(3):  # not only the first time
        with pytest.warns(GradreinWarning, match=r"built again for each of the last \d calls .* Build it once"):
            step(p, make())


def test_the_warning_points_at_the_loop():
    p = parameter()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            step(p, ByMedian())
    assert [w.filename for w in found] == [__file__]


def test_an_error_instead_leaves_everything_as_it_was():
    p, q = parameter(), parameter()
    kept = ByZScore()
    for _ in range(2):
        step(p, ByMedian())
        q.grad = gradient(1.0)
        gradrein.clip_({"q": q}, kept)
    before = tensors_of(kept.state_dict())
    p.grad = gradient(5.0)
    with pytest.raises(GradreinWarning):  # as the suite is configured
        gradrein.clip_({"q": q, "p": p}, {"q": kept, "p": ByMedian(ceiling=1.0)})
    torch.testing.assert_close(p.grad, gradient(5.0))
    torch.testing.assert_close(tensors_of(kept.state_dict()), before, equal_nan=True)


@every_policy
def test_built_once_is_silent(make):
    p, policy = parameter(), make()
    for _ in range(6):
        step(p, policy)


@every_policy
def test_policies_that_live_on_are_silent(make):
    """A sweep, a model used twice, an ensemble: each policy is still there when the next is made."""
    p, kept = parameter(), []
    for _ in range(6):
        kept.append(make())
        step(p, kept[-1])


@every_policy
def test_state_that_outlives_the_object_is_silent(make):
    """The functional style: load, clip, save."""
    p, saved = parameter(), None
    for _ in range(6):
        policy = make()
        if saved is not None:
            policy.load_state_dict(saved)
        step(p, policy)
        saved = policy.state_dict()


def test_other_parameters_classes_and_longer_lives_are_silent():
    p = parameter()
    for _ in range(6):
        step(parameter(), ByMedian())  # a new model each time
        gc.collect()
    for _ in range(4):  # each learns from two steps
        policy = ByMedian()
        step(p, policy)
        step(p, policy)
    for make in (ByMedian, ByZScore, SkipSpikes, ByMedian):
        step(p, make())


def test_stateless_policies_may_be_built_anywhere():
    p = parameter()
    for _ in range(6):
        step(p, gradrein.by_norm(1.0))


@every_policy
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))])
def test_a_copy_goes_on_from_what_was_learned(make, duplicate):
    p, policy = parameter(), make()
    for _ in range(4):
        step(p, policy)
    other = duplicate(policy)
    torch.testing.assert_close(tensors_of(other.state_dict()), tensors_of(policy.state_dict()), equal_nan=True)
    step(p, other)
