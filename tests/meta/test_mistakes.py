"""Mistakes get their error at once: one of ours, also the builtin people expect, with what was given and what is right.

Each row is a wrong call, the class of the error, and words that its text has: what was found, and the call or the thing
that would have been right. `BUILTINS` has what each class also is.
"""

import math
import warnings

import numpy
import pytest
import torch
from torch import nn

import gradrein
from gradrein import errors, policies
from gradrein.errors import ArgumentError, ArgumentTypeError, GradientTypeError


class Step:
    """A model, its optimizer, a batch, its losses with a graph, and gradients."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x = torch.randn(4, 3)
        self.losses = self.model(self.x).square().sum(1)
        self.loss = self.losses.sum()
        self.model(self.x).sum().backward()

    @property
    def per_sample(self):
        return gradrein.per_sample(self.losses, self.model)

    def monitor(self):
        return gradrein.Monitor(self.model, self.optimizer)

    def losses_in(self, mode):
        with mode:
            return self.model(self.x).square().sum(1)


def jagged(s):
    return torch.nested.as_nested_tensor([s.losses[:1], s.losses[1:]], layout=torch.jagged)


def other_optimizer():
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


NORM = gradrein.by_norm(1.0)


class NoOrder:
    """A policy that forgets to say which norm it looks at."""

    def decide(self, grads):
        return policies.Scale(torch.tensor(0.5))


class NoDecision:
    """A policy that returns a number."""

    p = 2.0

    def decide(self, grads):
        return 0.5


class Scaler:
    """A GradScaler that has gone wrong."""

    def get_scale(self):
        return math.inf


MONITOR = [
    (lambda s: gradrein.Monitor(s.optimizer), ArgumentTypeError, "found SGD", "Monitor(model, optimizer)"),
    (lambda s: gradrein.Monitor(s.optimizer, s.model), ArgumentTypeError, "SGD", "Monitor(model, optimizer)"),
    (lambda s: gradrein.Monitor(s.model, s.model), ArgumentTypeError, "Sequential", "Monitor(model, optimizer)"),
    (
        lambda s: gradrein.Monitor(s.model, other_optimizer()),
        ArgumentError,
        "has none of the model's parameters",
        "the model that the optimizer was built for",
    ),
    (lambda s: gradrein.Monitor(on_step=3), ArgumentTypeError, "found int: 3", "on_step=print"),
    (lambda s: gradrein.Monitor(record=3), ArgumentTypeError, "found int: 3", "record='run.jsonl'"),
    (lambda s: gradrein.Monitor(every=0), ArgumentError, "found 0", "whole number of at least 1"),
    (lambda s: gradrein.Monitor(every=True), ArgumentError, "found True", "whole number of at least 1"),
    (lambda s: gradrein.Monitor(max_bytes=1), ArgumentError, "found 1", "at least 10000"),
    (lambda s: gradrein.Monitor(clip=True), ArgumentTypeError, "found bool: True", "gradrein.by_norm(1.0)"),
    (lambda s: gradrein.Monitor(clip=policies.ByMedian), ArgumentTypeError, "the class", "ByMedian(...)"),
    (lambda s: gradrein.Monitor(clip=-1), ArgumentError, "found -1", "zero or more"),
    (lambda s: gradrein.Monitor(clip="zzz"), ArgumentError, "'zzz'", "auto"),
    (lambda s: s.monitor().findings(), errors.RecordError, "never started", "with monitor:"),
    (lambda s: s.monitor().report(), errors.RecordError, "never started", "monitor.start()"),
    (lambda s: s.monitor().per_sample(3), ArgumentTypeError, "found int: 3", "ps.norms()"),
    (lambda s: s.monitor().per_sample(torch.ones(2, 2)), ArgumentError, "(2, 2)", "ps.norms()"),
]

CLIP = [
    (lambda s: gradrein.Clipper(s.model, NORM), ArgumentTypeError, "found Sequential", "Clipper(optimizer"),
    (lambda s: gradrein.Clipper(s.optimizer, 1.0), ArgumentTypeError, "float: 1.0", "gradrein.by_norm(1.0)"),
    (lambda s: gradrein.Clipper(s.optimizer, policies.ByMedian), ArgumentTypeError, "class", "ByMedian(...)"),
    (lambda s: gradrein.Clipper(s.optimizer, gradrein.by_norm), ArgumentTypeError, "function", "by_norm(1.0)"),
    (lambda s: gradrein.Clipper(s.optimizer, "zzz"), ArgumentError, "'zzz'", "by_norm(1.0)"),
    (lambda s: gradrein.Clipper(s.optimizer, {"*": NORM}), ArgumentError, "has none", "model=model"),
    (
        lambda s: gradrein.Clipper(s.optimizer, {"zzz": NORM, "*": NORM}, model=s.model),
        ArgumentError,
        "'zzz' is never used",
        "Names here: 0.weight",
    ),
    (
        lambda s: gradrein.Clipper(s.optimizer, {"0.*": NORM}, model=s.model),
        ArgumentError,
        "no pattern matches the parameter '1.weight'",
        '"*" matches all',
    ),
    (lambda s: gradrein.Clipper(s.optimizer, {}, model=s.model), ArgumentError, "0.weight", '"*" matches'),
    (lambda s: gradrein.Clipper(s.optimizer, {"*": 1.0}, model=s.model), ArgumentTypeError, "1.0", "by_norm(1.0)"),
    (lambda s: gradrein.Clipper(s.optimizer, {0: NORM}, model=s.model), ArgumentTypeError, "int: 0", "'head.*'"),
    (lambda s: gradrein.Clipper(s.optimizer, NORM, model=s.optimizer), ArgumentTypeError, "SGD", "model=model"),
    (
        lambda s: gradrein.Clipper(s.optimizer, NORM, model=nn.Linear(1, 1)),
        ArgumentError,
        "4 of the 4 parameters",
        "the model the optimizer was built for",
    ),
    (lambda s: gradrein.Clipper(s.optimizer, NORM, nonfinite="zzz"), ArgumentError, "'zzz'", "raise, skip"),
    (lambda s: gradrein.Clipper(s.optimizer, NORM, placement=3), ArgumentError, "int: 3", "Disjoint(group)"),
    (
        lambda s: gradrein.Clipper(s.optimizer, policies.ByMedian()).load_state_dict(None),
        ArgumentTypeError,
        "NoneType: None",
        "state_dict()",
    ),
    (lambda s: gradrein.clip_(s.model, policies.ByMedian), ArgumentTypeError, "the class", "ByMedian(...)"),
    (lambda s: gradrein.clip_(s.model, 1.0), ArgumentTypeError, "float: 1.0", "gradrein.by_norm(1.0)"),
    (lambda s: gradrein.clip_(NORM, s.model), GradientTypeError, "ByNorm", "a module, an optimizer"),
    (lambda s: gradrein.clip_([s.model], NORM), errors.NotAParameterError, "Sequential", "a module"),
    (lambda s: gradrein.clip_(s.model, NORM, placement="x"), ArgumentError, "str: 'x'", "Disjoint(group)"),
    (lambda s: gradrein.distributed.Disjoint("x"), ArgumentTypeError, "str: 'x'", "Disjoint(torch.distributed"),
    (lambda s: gradrein.distributed.Disjoint(None), ArgumentTypeError, "NoneType", "init_process_group"),
    (lambda s: gradrein.clip_(s.model, NoOrder()), ArgumentTypeError, "NoOrder", "p = 2.0"),
    (
        lambda s: gradrein.clip_(s.model, {"0.*": gradrein.by_norm(1e-3), "*": NoDecision()}),
        ArgumentTypeError,
        "float: 0.5",
        "Scale, Clamp or Skip",
    ),
    (lambda s: gradrein.by_norm(torch.tensor(1j)), ArgumentTypeError, "complex", "one number"),
    (lambda s: gradrein.by_norm(torch.ones(2)), ArgumentError, "shape (2,)", "one number"),
    (lambda s: gradrein.by_unit(unit_dims="a"), ArgumentError, "'a'", "0 or (0, 1)"),
]

POLICIES = [
    (lambda s: policies.ByMedian().load_state_dict(None), ArgumentTypeError, "NoneType", "state_dict()"),
    (lambda s: policies.ByMedian().load_state_dict({}), ArgumentError, "None", "state_dict()"),
    (
        lambda s: policies.ByMedian(k=3).load_state_dict(policies.ByMedian(k=2).state_dict()),
        ArgumentError,
        "k=2.0; this one has k=3.0",
        "as it was when it was saved",
    ),
    (
        lambda s: policies.SkipSpikes(NORM).load_state_dict(policies.SkipSpikes().state_dict()),
        ArgumentError,
        "policy=None; this one has policy='ByNorm'",
        "as it was when it was saved",
    ),
    (lambda s: policies.SkipSpikes().load_state_dict(None), ArgumentTypeError, "NoneType", "state_dict()"),
    (lambda s: policies.SkipSpikes(3), ArgumentTypeError, "int: 3", "gradrein.by_norm(3)"),
    (lambda s: policies.SkipSpikes().see("a"), ArgumentError, "'a'", "loss.detach()"),
    (lambda s: policies.ByOvershoot().load_state_dict(None), ArgumentTypeError, "None", "state_dict()"),
]

PER_SAMPLE = [
    (lambda s: gradrein.per_sample(s.model, s.losses), ArgumentTypeError, "Sequential", "per_sample(losses, model)"),
    (lambda s: gradrein.per_sample(list(s.losses), s.model), ArgumentTypeError, "list", "torch.stack(losses)"),
    (lambda s: gradrein.per_sample(s.losses.mean(), s.model), ArgumentError, "single number", "reduction='none'"),
    (lambda s: gradrein.per_sample(s.losses.to(torch.complex64), s.model), ArgumentError, "complex64", "losses.real"),
    (lambda s: gradrein.per_sample(jagged(s), s.model), ArgumentError, "nested", "torch.stack"),
    (lambda s: gradrein.per_sample(s.losses.to_sparse(), s.model), ArgumentError, "sparse", "to_dense()"),
    (lambda s: gradrein.per_sample(s.losses.detach(), s.model), errors.NoGraphError, "no recorded", "gradients on"),
    (
        lambda s: gradrein.per_sample(s.losses_in(torch.inference_mode()), s.model),
        errors.NoGraphError,
        "inference_mode",
        "outside",
    ),
    (
        lambda s: gradrein.per_sample(s.losses_in(torch.no_grad()), s.model),
        errors.NoGraphError,
        "no_grad",
        "gradients on",
    ),
    (lambda s: gradrein.per_sample(s.losses, s.optimizer), GradientTypeError, "SGD", "per_sample(losses, model)"),
    (lambda s: gradrein.per_sample(s.losses, s.model.parameters), GradientTypeError, "method", "Pass the model"),
    (lambda s: gradrein.per_sample(s.losses, [s.model]), GradientTypeError, "Sequential", "named_parameters()"),
    (
        lambda s: gradrein.per_sample(s.losses, ["w"]),
        GradientTypeError,
        "'0' is not a tensor but str",
        "named_parameters()",
    ),
    (lambda s: gradrein.per_sample(s.losses, {"w": s.x * s.loss}), GradientTypeError, "'w' was computed from", "Pass"),
    (lambda s: gradrein.per_sample(s.losses, [(1, 2, 3)]), GradientTypeError, "tuple", "a name and a tensor"),
    (
        lambda s: gradrein.per_sample(s.losses, [*s.model[0].named_parameters(), *s.model[1].named_parameters()]),
        ArgumentError,
        "two parameters are called 'weight'",
        "ModuleDict",
    ),
    (lambda s: gradrein.per_sample(s.losses, s.model, scaler=Scaler()), ArgumentError, "inf", "init_scale"),
    (lambda s: gradrein.per_sample(s.losses, s.model, scaler=1), ArgumentTypeError, "found 1", "GradScaler"),
    (
        lambda s: gradrein.per_sample(s.losses, s.model, sample_groups=torch.tensor([0.0, math.nan, 1, 1])),
        ArgumentError,
        "NaN",
        "int64",
    ),
    (lambda s: gradrein.per_sample(s.losses, s.model, sample_groups=[0, 0, 1, 1]), ArgumentTypeError, "list", "tensor"),
    (lambda s: gradrein.per_sample(s.losses, s.model, memory_budget=-1), ArgumentError, "-1", "whole number"),
    (lambda s: gradrein.per_sample(s.losses, s.model, memory_budget=None), ArgumentError, "None", "whole number"),
    (lambda s: s.per_sample.clip_(None), ArgumentTypeError, "None", "clip_(1.0)"),
    (lambda s: s.per_sample.clip_("a"), ArgumentError, "'a'", "clip_(1.0)"),
    (lambda s: s.per_sample.clip_(True), ArgumentTypeError, "True", "clip_(1.0)"),
    (lambda s: s.per_sample.clip_(0), ArgumentError, "0.0", "positive"),
    (lambda s: s.per_sample.clip_(1.0, gamma=math.inf), ArgumentError, "inf", "finite"),
    (lambda s: s.per_sample.clip_(1.0, divide_by=math.inf), ArgumentError, "inf", "finite"),
    (lambda s: s.per_sample.clip_(1.0, divide_by=0), ArgumentError, "found 0", "above zero"),
    (lambda s: s.per_sample.dot(3), ArgumentTypeError, "int", "named_parameters()"),
    (lambda s: s.per_sample.dot({"0.weight": 3}), ArgumentTypeError, "int", "must be a tensor"),
    (lambda s: s.per_sample.dot({"zzz": torch.ones(1)}), ArgumentError, "'zzz'", "0.weight"),
    (lambda s: s.per_sample.dot({"0.bias": torch.ones(9)}), ArgumentError, "shape (9,)", "its parameter (2,)"),
    (lambda s: s.per_sample.cosine([torch.ones(2, 3)]), ArgumentTypeError, "list", "named_parameters()"),
    (lambda s: s.per_sample.stream(samples=1.5), ArgumentError, "1.5", "whole number"),
    (lambda s: s.per_sample.weighted_([1, 2, 3, 4]), ArgumentTypeError, "list", "shape (4,)"),
    (lambda s: s.per_sample.weighted_(torch.ones(4) * 1j), ArgumentError, "complex", "real"),
    (lambda s: s.per_sample.audit(tolerance="a"), ArgumentError, "'a'", "is a number"),
    (lambda s: s.per_sample.audit(tolerance=-1), ArgumentError, "-1", "not negative"),
    (lambda s: gradrein.register_rule(3, 3), ArgumentTypeError, "found 3", "register_rule(Scale, rule)"),
    (lambda s: gradrein.declare_samplewise(3), ArgumentTypeError, "found 3", "declare_samplewise(Scale, dim=0)"),
    (lambda s: gradrein.call_for_per_sample_grads(3), errors.CallArgumentError, "int", "nn.Module"),
]

AUTOGRAD = [
    (lambda s: gradrein.trace(s.model, s.loss), ArgumentTypeError, "Sequential", "gradrein.trace(loss, model)"),
    (lambda s: gradrein.trace(s.losses, s.model), errors.GradientMismatchError, "(4,)", ".sum()"),
    (lambda s: gradrein.trace(s.loss.detach()), errors.NoGraphError, "no recorded graph", "gradients on"),
    (lambda s: gradrein.trace(s.loss, s.optimizer), ArgumentTypeError, "SGD", "Pass the model"),
    (lambda s: gradrein.trace(s.loss, s.model, gradient=3), GradientTypeError, "found 3", "a gradient is"),
    (lambda s: gradrein.trace(s.loss, s.model, modules=3), ArgumentTypeError, "int", "record_modules()"),
    (lambda s: gradrein.detect_nonfinite(s.optimizer), ArgumentTypeError, "SGD", "Pass the model"),
    (lambda s: gradrein.grad(s.loss, 3), GradientTypeError, "found 3", "gradrein.grad(loss, model)"),
    (lambda s: gradrein.grad(s.loss, s.optimizer), GradientTypeError, "SGD", "optimizer.param_groups"),
    (lambda s: gradrein.grad(3, s.model), GradientTypeError, "found 3", "gradrein.grad(loss, model)"),
    (lambda s: gradrein.backward(None), GradientTypeError, "None", "the loss"),
    (lambda s: gradrein.backward(s.loss, inputs=3), GradientTypeError, "found 3", "parameters"),
    (
        lambda s: gradrein.autograd.find_unused_parameters(s.model, s.loss),
        ArgumentTypeError,
        "Sequential",
        "find_unused_parameters(loss, model)",
    ),
    (lambda s: gradrein.autograd.find_unused_parameters(s.loss, 3), ArgumentTypeError, "int: 3", "the model"),
    (lambda s: gradrein.autograd.replay(3, s.x), GradientTypeError, "found 3", "the loss"),
]

ONES = torch.ones(2)

FUNCTIONAL = [
    (lambda s: gradrein.clip_by_global_norm(3, 1.0), ArgumentTypeError, "int: 3", "clip_by_global_norm(["),
    (lambda s: gradrein.clip_by_global_norm([3.0], 1.0), ArgumentTypeError, "float: 3.0", "([p.grad for"),
    (
        lambda s: torch.func.grad(lambda t: gradrein.clip_by_norm(t, 1.0).sum())(ONES),
        errors.UnsupportedGradientError,
        "not differentiable",
        "tensor.detach()",
    ),
    (
        lambda s: torch.func.grad(lambda t: gradrein.clip_by_value(t, 0, 1).sum())(ONES),
        errors.UnsupportedGradientError,
        "not differentiable",
        "tensor.detach()",
    ),
    (lambda s: gradrein.clip_by_norm([ONES], 1.0), ArgumentTypeError, "list", "clip_by_global_norm(["),
    (lambda s: gradrein.clip_by_norm(ONES, 1.0, axes=5), ArgumentError, "found 5", "axes=0"),
    (lambda s: gradrein.clip_by_norm(ONES.long(), 1.0), errors.UnsupportedGradientError, "int64", "Convert it first"),
    (lambda s: gradrein.clip_by_value(3, 0, 1), ArgumentTypeError, "int: 3", "Pass a tensor"),
    (lambda s: gradrein.clip_by_value(ONES, 1, 0), ArgumentError, "is 1 and clip_value_max 0", "swap them"),
    (lambda s: gradrein.clip_by_value(ONES, None, 1), ArgumentTypeError, "None", "a number or a tensor"),
    (lambda s: gradrein.clip_by_value(ONES, math.nan, 1), ArgumentError, "nan", "float32 can hold"),
    (lambda s: gradrein.clip_by_value(ONES, torch.ones(3), 1), ArgumentError, "(3,)", "broadcasts"),
    (lambda s: gradrein.clip_by_value(ONES.long(), 0, 1), errors.UnsupportedGradientError, "int64", "torch.clamp"),
    (lambda s: gradrein.clip_by_value(ONES * 1j, 0, 1), errors.UnsupportedGradientError, "complex", "clip_by_norm"),
]

# The drop-ins, with the exception of torch's own function.
DROP_INS = [
    (lambda s: gradrein.clip_grad_norm_(None, 1.0), GradientTypeError, "None", "a module"),
    (lambda s: gradrein.clip_grad_norm_([None], 1.0), errors.NotAParameterError, "None", "a module"),
    (lambda s: gradrein.clip_grad_norm_(s.model.parameters(), None), ArgumentTypeError, "None", "number"),
    (lambda s: gradrein.clip_grad_norm_(s.model.parameters(), "a"), ArgumentError, "'a'", "number"),
    (lambda s: gradrein.clip_grad_norm_(s.model.parameters(), 1.0, "a"), ArgumentError, "'a'", "'inf'"),
    (lambda s: gradrein.clip_grad_value_(s.model.parameters(), None), ArgumentTypeError, "None", "number"),
    (lambda s: gradrein.get_total_norm([3]), errors.NotAParameterError, "int: 3", "a module"),
]

BUILTINS = {
    ArgumentError: [ValueError],
    ArgumentTypeError: [TypeError, ValueError],
    GradientTypeError: [TypeError],
    errors.CallArgumentError: [RuntimeError, ValueError],
    errors.NoGraphError: [RuntimeError],
    errors.GradientMismatchError: [RuntimeError],
    errors.NotAParameterError: [TypeError, AttributeError],
    errors.RecordError: [ValueError],
    errors.UnsupportedGradientError: [NotImplementedError],
}
ROWS = [*MONITOR, *CLIP, *POLICIES, *PER_SAMPLE, *AUTOGRAD, *FUNCTIONAL, *DROP_INS]


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_a_mistake_gets_its_error_at_once(row):
    call, kind, found, right = row
    step = Step()
    before = [p.grad.clone() for p in step.model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about nested tensors being a prototype
        with pytest.raises(kind) as caught:
            call(step)
    assert isinstance(caught.value, errors.GradreinError)
    assert all(isinstance(caught.value, builtin) for builtin in BUILTINS[kind])
    text = str(caught.value)
    assert found in text
    assert right in text
    assert len(text) < 600
    assert all(torch.equal(p.grad, g) for p, g in zip(step.model.parameters(), before, strict=True))


def test_a_wrong_clipper_leaves_no_hook():
    step = Step()
    for wrong in (1.0, policies.ByMedian, {"zzz": NORM}):
        with pytest.raises(ArgumentError):
            gradrein.Clipper(step.optimizer, wrong, model=step.model)
    before = [p.detach().clone() for p in step.model.parameters()]
    for p in step.model.parameters():
        p.grad = torch.full_like(p, 100.0)
    step.optimizer.step()
    for p, was in zip(step.model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), was - 10.0)


def test_a_clipper_loads_all_states_or_none():
    step = Step()
    make = lambda k: {"0.*": policies.ByMedian(), "*": policies.ByMedian(k=k)}  # noqa: E731
    with gradrein.Clipper(step.optimizer, make(2.0), model=step.model) as clipper:
        step.optimizer.step()
        saved = clipper.state_dict()
    with gradrein.Clipper(step.optimizer, make(3.0), model=step.model) as other:
        with pytest.raises(ArgumentError, match="k=2.0"):
            other.load_state_dict(saved)
        assert other.state_dict()["0.*"]["rows"]["keys"] == []


def test_frozen_parameters_need_no_pattern():
    step = Step()
    step.model[1].requires_grad_(False)
    gradrein.Clipper(step.optimizer, {"0.*": NORM}, model=step.model).remove()


def test_what_is_right_is_taken():
    step = Step()
    gradrein.Monitor(step.model, step.optimizer, every=2, record=None, on_step=print, clip=torch.tensor(1.0))
    gradrein.Monitor(None, step.optimizer, clip="zscore")
    assert (
        len(gradrein.per_sample(step.losses, step.model, memory_budget=0, sample_groups=torch.tensor([3, 3, -1, 0])))
        == 3
    )
    step.per_sample.clip_(torch.tensor([1.0]), gamma=0, divide_by=numpy.float32(2))
