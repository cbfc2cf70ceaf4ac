"""What a step writes besides gradients, and what is changed between `per_sample` and its answers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradrein

pytestmark = pytest.mark.needs("autograd_would_have_decomposed")


class Counting(nn.Module):
    """A layer beside a buffer, a statistic and a plain tensor, which `write` changes."""

    def __init__(self, write):
        super().__init__()
        self.layer, self.stats = nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False)
        self.register_buffer("seen", torch.zeros(4))
        self.plain, self.write = torch.zeros(4), write

    def forward(self, x):
        h = self.layer(x)
        self.write(self, h.detach())
        return (h + self.seen + self.plain).sin().sum(1)


IN_PLACE, STATISTICS = (
    "it changes a tensor in place that it was given, or a buffer",
    "it updates the running statistics",
)
WRITES = {
    "data of a buffer": lambda m, h: m.seen.data.mul_(0.9).add_(h.mean(0), alpha=0.1),
    "data of a view": lambda m, _: m.plain[:1].data.add_(1),
    "data of a parameter": lambda m, _: m.layer.bias.data.add_(1),
    "foreach": lambda m, _: torch._foreach_add_([m.seen], 1.0),
    "statistics that are not used": lambda m, h: m.stats(h),
    "statistics of a function": lambda m, h: F.batch_norm(h, m.plain, m.seen, training=True),
    "in place": lambda m, _: m.seen.add_(1),
    "set anew": lambda m, h: setattr(m, "seen", h.mean(0)),
    "a value of the step": lambda m, h: h.add_(1),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_is_written_once_by_the_eager_step(write):
    eager = Counting(WRITES[write])
    other = copy.deepcopy(eager)
    compiled = gradrein.compile(lambda x: gradrein.per_sample(other(x), other).clip_(1.0), other, backend="captured")
    for _ in range(4):
        x = torch.randn(5, 3)
        torch.testing.assert_close(compiled(x), gradrein.per_sample(eager(x), eager).clip_(1.0))
        for name in eager.state_dict():
            torch.testing.assert_close(other.state_dict()[name], eager.state_dict()[name], msg=name)
        torch.testing.assert_close(other.plain, eager.plain)
    captured = write in ("set anew", "a value of the step")
    assert (": captured" if captured else STATISTICS if "statistics" in write else IN_PLACE) in compiled.explain()


def test_an_input_that_is_changed_or_returned():
    model = nn.Linear(3, 2)
    for step, why in [
        (lambda x: gradrein.per_sample(model(x.mul_(2)).sum(1), model).norms(), IN_PLACE),
        (lambda x: (gradrein.per_sample(model(x).sum(1), model).norms(), x), ": captured"),
    ]:
        compiled, x = gradrein.compile(step, model, backend="captured"), torch.randn(4, 3)
        for _ in range(3):
            torch.testing.assert_close(compiled(x.clone()), step(x.clone()))
        assert why in compiled.explain()


@pytest.mark.parametrize("asked_before", [True, False])
def test_losses_that_are_changed_in_place_after_the_call(asked_before):
    model = nn.Linear(3, 2)

    def step(x, w):
        losses = model(x).sin().sum(1)
        ps = gradrein.per_sample(losses, model, retain_graph=True)
        before = ps.norms() if asked_before else w
        losses *= w
        return before, (gradrein.per_sample(losses, model) if asked_before else ps).norms()

    compiled, w = gradrein.compile(step, model, backend="captured"), torch.tensor([1.0, 10.0, 100.0])
    for _ in range(3):
        x = torch.randn(3, 3)
        torch.testing.assert_close(compiled(x, w), step(x, w))
    assert "the losses are changed in place after per_sample was called" in compiled.explain()


def _same_as_eager(make, *, around=torch.enable_grad):
    """Run a step and its eager twin three times each; return what is said about the compiled one."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    other = copy.deepcopy(eager)
    plain, compiled = make(eager), gradrein.compile(make(other), other, backend="captured")
    for _ in range(3):
        x = torch.randn(5, 3)
        with around():
            expected, found = plain(x), compiled(x)
        torch.testing.assert_close(found, expected)
        for p, q in zip(other.parameters(), eager.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)
    return compiled.explain()


def test_a_step_that_records_inside_of_no_grad():
    """What is outside of its own block has no graph: its parameters get no gradient."""

    def make(model):
        def step(x):
            hidden = model[1](model[0](x))
            with torch.enable_grad():
                return gradrein.per_sample(model[2](hidden).square().sum(1), model).clip_(1.0)

        return step

    assert ": captured" in _same_as_eager(make, around=torch.no_grad)
    assert ": captured" in _same_as_eager(make)


def test_what_is_kept_has_no_graph_after_the_step():
    model, x = nn.Linear(3, 2), torch.randn(5, 3)

    def step(x):
        ps = gradrein.per_sample(model(x).square().sum(1), model)
        return ps.norms(), ps

    compiled = gradrein.compile(step, model, backend="captured")
    for _ in range(3):
        _, found = compiled(x)
    assert ": captured" in compiled.explain()
    with pytest.raises(
        gradrein.errors.GraphFreedError, match="`clip_` was called on per-sample gradients that a compiled"
    ):
        found.clip_(1.0)
