"""The drop-in contract of torch.nn.utils.clip_grad_*: what torch promises, and ours as torch's."""

import inspect
import math
import warnings

import helpers
import pytest
import torch

import gradrein

TORCH = torch.nn.utils
FOREACH = [None, True, False]


def same_model():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    model(torch.randn(4, 7)).pow(2).sum().backward()
    return model


@pytest.mark.parametrize(
    "name", ["clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "get_total_norm", "clip_grads_with_norm_"]
)
def test_signature_is_torchs(name):
    ours, theirs = inspect.signature(getattr(gradrein, name)), inspect.signature(getattr(TORCH, name))
    shared = [p for p in ours.parameters.values() if p.kind is not p.KEYWORD_ONLY]  # what is ours alone is by keyword
    assert [p.name for p in shared] == list(theirs.parameters)
    assert [p.default for p in shared] == [p.default for p in theirs.parameters.values()]


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("norm_type", [1, 2, 2.0, 3, 1.5, 0.5, math.inf, "inf"])
@pytest.mark.parametrize("max_norm", [0, 0.01, 1, 1e6, math.inf])
def test_same_numbers_as_torch(norm_type, max_norm, foreach):
    ours, theirs = same_model(), same_model()
    found = gradrein.clip_grad_norm_(ours.parameters(), max_norm, norm_type, foreach=foreach)
    expected = TORCH.clip_grad_norm_(theirs.parameters(), max_norm, norm_type)
    torch.testing.assert_close(found, expected)
    assert found.dim() == 0
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("clip_value", [0, 0.01, 1, 1e6])
def test_value_same_as_torch(clip_value, foreach):
    ours, theirs = same_model(), same_model()
    assert gradrein.clip_grad_value_(ours.parameters(), clip_value, foreach=foreach) is None
    TORCH.clip_grad_value_(theirs.parameters(), clip_value)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_gradients_are_changed_in_place():
    (p,) = helpers.parameters([torch.tensor([3.0, 4.0])])
    kept = p.grad
    gradrein.clip_grad_norm_(p, 1.0)
    assert p.grad is kept
    torch.testing.assert_close(kept, torch.tensor([0.6, 0.8]))


def test_autograd_is_told_of_the_write():
    (p,) = helpers.parameters([torch.tensor([3.0, 4.0])])
    before = p.grad._version
    gradrein.clip_grad_norm_(p, 1.0)
    assert p.grad._version > before
    again = p.grad._version
    gradrein.clip_grad_norm_(p, 10.0)
    assert p.grad._version == again  # nothing was written


def test_two_halves_make_the_whole():
    ours, theirs = same_model(), same_model()
    grads = [p.grad for p in ours.parameters()]
    total = gradrein.get_total_norm(grads)
    gradrein.clip_grads_with_norm_(ours.parameters(), 0.1, total)
    assert torch.equal(gradrein.clip_grad_norm_(theirs.parameters(), 0.1), total)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


def test_deprecated_alias_warns_and_works():
    model = same_model()
    with pytest.warns(FutureWarning, match="clip_grad_norm_"):
        found = gradrein.clip_grad_norm(model.parameters(), 1e9)
    torch.testing.assert_close(found, TORCH.clip_grad_norm_(model.parameters(), 1e9))


def test_no_gradient_is_zero_and_no_error():
    for target in ([], [torch.nn.Parameter(torch.ones(2))], torch.nn.Linear(2, 2)):
        assert gradrein.clip_grad_norm_(target, 1.0) == torch.tensor(0.0)
        assert gradrein.clip_grad_value_(target, 1.0) is None
    assert gradrein.get_total_norm([]) == torch.tensor(0.0)
    assert gradrein.clip_grads_with_norm_([], 1.0, torch.tensor(1.0)) is None


def test_parameters_without_gradient_are_skipped():
    ps = helpers.parameters([torch.tensor([3.0]), None, torch.tensor([4.0])])
    assert gradrein.clip_grad_norm_(ps, 1.0).item() == 5
    assert ps[1].grad is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("foreach", FOREACH)
def test_error_if_nonfinite_leaves_gradients(bad, foreach):
    model = same_model()
    model[2].weight.grad[1, 2] = bad
    kept = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(
        RuntimeError, match=r"(?s)is non-finite, so it cannot be clipped.*2\.weight \(1 value\)"
    ) as info:
        gradrein.clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True, foreach=foreach)
    assert isinstance(info.value, gradrein.errors.NonFiniteGradientError)
    assert list(info.value.offenders.values()) == [1]
    for p, before in zip(model.parameters(), kept, strict=True):
        torch.testing.assert_close(p.grad, before, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("foreach", FOREACH)
def test_otherwise_scales_anyway_as_torch_does(bad, foreach):
    ours, theirs = same_model(), same_model()
    for m in (ours, theirs):
        m[0].bias.grad[0] = bad
    found = gradrein.clip_grad_norm_(ours.parameters(), 0.1, foreach=foreach)
    torch.testing.assert_close(found, TORCH.clip_grad_norm_(theirs.parameters(), 0.1), equal_nan=True)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, equal_nan=True)


def test_foreach_true_on_a_device_without_it():
    p = torch.nn.Parameter(torch.empty(2, device="meta"))
    p.grad = torch.empty(2, device="meta")
    for call in (
        lambda: gradrein.clip_grad_norm_([p], 1.0, foreach=True),
        lambda: gradrein.clip_grad_value_([p], 1.0, foreach=True),
        lambda: gradrein.get_total_norm([p.grad], foreach=True),
        lambda: gradrein.clip_grads_with_norm_([p], 1.0, 1.0, foreach=True),
    ):
        with pytest.raises(RuntimeError, match="can't use the foreach API on meta tensors"):
            call()


def test_no_tape_is_recorded():
    x = torch.randn(3, requires_grad=True)
    (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    p = torch.nn.Parameter(torch.zeros(3))
    p.grad = g
    for foreach in FOREACH:
        assert not gradrein.clip_grad_norm_([p], 0.1, foreach=foreach).requires_grad
    clipped, total = gradrein.clip_by_global_norm([x * 2], 0.1)
    assert not total.requires_grad
    assert not clipped[0].requires_grad
    assert not gradrein.clip_by_norm(x * 2, 0.1).requires_grad
    assert not gradrein.clip_by_value(x * 2, -0.1, 0.1).requires_grad


def test_ints_and_tensors_as_thresholds():
    for limit in (1, 1.0, torch.tensor(1.0), torch.tensor([1]), torch.tensor(1, dtype=torch.float64)):
        (p,) = helpers.parameters([torch.tensor([3.0, 4.0])])
        gradrein.clip_grad_norm_(p, limit)
        torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]))
        (p,) = helpers.parameters([torch.tensor([3.0, -0.5])])
        gradrein.clip_grad_value_(p, limit)
        assert p.grad.tolist() == [1.0, -0.5]


def test_usual_calls_do_not_warn():
    model = same_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradrein.clip_grad_norm_(model.parameters(), 1.0)
        gradrein.clip_grad_norm_(list(model.parameters()), 1.0)
        gradrein.clip_grad_norm_([], 1.0)
        gradrein.clip_grad_norm_(torch.nn.Linear(2, 2).parameters(), 1.0)  # before any backward


def value(function, *args):
    try:
        function(*args)
    except Exception as error:
        return error
    return None


WRONG = {
    "max_norm None": lambda m, p: m.clip_grad_norm_([p], None),
    "max_norm a list": lambda m, p: m.clip_grad_norm_([p], [1]),
    "max_norm a word": lambda m, p: m.clip_grad_norm_([p], "much"),
    "max_norm two": lambda m, p: m.clip_grad_norm_([p], torch.ones(2)),
    "norm_type None": lambda m, p: m.clip_grad_norm_([p], 1.0, None),
    "norm_type a word": lambda m, p: m.clip_grad_norm_([p], 1.0, "two"),
    "clip_value None": lambda m, p: m.clip_grad_value_([p], None),
    "clip_value a word": lambda m, p: m.clip_grad_value_([p], "much"),
    "max_norm None, known norm": lambda m, p: m.clip_grads_with_norm_([p], None, torch.tensor(1.0)),
    "total_norm None": lambda m, p: m.clip_grads_with_norm_([p], 1.0, None),
    "norm_type None, total": lambda m, p: m.get_total_norm([p.grad], None),
    "None among parameters": lambda m, p: m.clip_grad_norm_([p, None], 1.0),
    "None first": lambda m, p: m.clip_grad_norm_([None, p], 1.0),
    "None among parameters, value": lambda m, p: m.clip_grad_value_([p, None], 1.0),
    "None among parameters, known norm": lambda m, p: m.clip_grads_with_norm_([p, None], 1.0, torch.tensor(9.0)),
    "None among tensors": lambda m, p: m.get_total_norm([None, p.grad]),
    "a number among parameters": lambda m, p: m.clip_grad_norm_([p, 3], 1.0),
    "a word among parameters": lambda m, p: m.clip_grad_norm_([p, "w"], 1.0),
    "a generator with None": lambda m, p: m.clip_grad_norm_((q for q in (p, None)), 1.0),
    "parameters None": lambda m, p: m.clip_grad_norm_(None, 1.0),
    "parameters None, value": lambda m, p: m.clip_grad_value_(None, 1.0),
    "tensors None": lambda m, p: m.get_total_norm(None),
    "parameters a number": lambda m, p: m.clip_grad_norm_(3, 1.0),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_torch_raises_catches_ours(name):
    (p,) = helpers.parameters([torch.tensor([3.0, 4.0])])
    theirs = value(WRONG[name], torch.nn.utils, p)
    p.grad = torch.tensor([3.0, 4.0])
    ours = value(WRONG[name], gradrein, p)
    assert isinstance(ours, gradrein.errors.GradreinError)
    assert isinstance(ours, type(theirs)), f"{ours!r}, and torch raises {theirs!r}"
    assert "parameters" not in name or "a parameter was expected, found" in str(ours)
    assert p.grad.tolist() == [3, 4]


class Subclass(torch.Tensor):
    pass


def test_the_norm_of_gradients_in_a_subclass_is_of_its_class_as_in_torch():
    norms = []
    for clip in (torch.nn.utils.clip_grad_norm_, gradrein.clip_grad_norm_):
        parameter = torch.nn.Parameter(torch.ones(3))
        parameter.grad = torch.ones(3).as_subclass(Subclass)
        norms.append(clip([parameter], 1.0))
        assert type(parameter.grad) is Subclass
    assert [type(norm) for norm in norms] == [Subclass, Subclass]
    assert torch.equal(*norms)
