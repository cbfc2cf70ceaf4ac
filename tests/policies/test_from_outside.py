"""A stranger writes policies with public names only."""

import ast
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cases import gradient, parameter

import gradrein
from gradrein.policies import AdaptivePolicy, Clamp, Decision, GradientView, Policy, Scale, Skip, State, clip_factor


@dataclass(frozen=True)
class BySquareRoot:
    """Stateless: a norm above 1 becomes its square root."""

    p: float = 2.0

    def decide(self, grads: GradientView) -> Decision:
        norm = grads.total_norm(self.p)
        return Scale(clip_factor(norm.clamp(min=1.0).sqrt(), norm))


class NoBias:
    """Stateless: limits biases by value, skips where a weight is too large, refuses scalars."""

    p = math.inf

    def check(self, grads: GradientView) -> None:
        if any(t.dim() == 0 for t in grads.tensors):
            raise ValueError(f"scalars: {grads.names()}")

    def decide(self, grads: GradientView) -> Decision:
        return Skip((grads.norms(self.p) > 100).any(), Clamp(0.5))


class ByLast(AdaptivePolicy):
    """Adaptive: at most `k` times the norm before."""

    def __init__(self, k: float, **settings: object) -> None:
        super().__init__(**settings)
        self.k = k

    def init(self) -> State:
        return {"last": torch.full((), math.nan, dtype=torch.float64)}

    def update(self, state: State, norm: torch.Tensor, warm: torch.Tensor) -> tuple[torch.Tensor, State]:
        limit = self.bounded(self.k * state["last"], warm)
        return limit, {"last": torch.minimum(norm, limit)}


def clip(ps, policy, *norms):
    for p, norm in zip(ps, norms, strict=True):
        p.grad = gradient(norm)
    return gradrein.clip_({str(i): p for i, p in enumerate(ps)}, policy)


def test_stateless():
    policy, p = BySquareRoot(), parameter()
    assert isinstance(policy, Policy)
    assert clip([p], policy, 9.0).norm_after == pytest.approx(3.0)
    assert not clip([p], policy, 0.5).clipped
    report = clip([p, parameter()], {"0": policy, "1": gradrein.by_norm(1.0)}, 16.0, 5.0)
    assert {k: r.norm_after for k, r in report.by_pattern.items()} == pytest.approx({"0": 4.0, "1": 1.0})


def test_a_limit_on_values_is_measured_by_the_largest():
    """What another norm comes to after it cannot be told from the norm before."""
    policy, p = NoBias(), parameter()
    policy.p = 2.0
    with pytest.raises(
        gradrein.errors.ArgumentError, match=r"NoBias limits values and has p = 2.0.* Write `p = math.inf`"
    ):
        clip([p], policy, 3.0)
    assert p.grad.norm() == pytest.approx(3.0)


def test_stateless_with_a_check_and_a_skip():
    p = parameter()
    assert clip([p], NoBias(), 3.0).norm_after == 0.5
    assert clip([p], NoBias(), 1000.0).skipped
    scalar = torch.nn.Parameter(torch.tensor(1.0))
    scalar.grad = torch.tensor(7.0)
    with pytest.raises(ValueError, match="scalars: .*'s'"):
        gradrein.clip_({"s": scalar}, NoBias())
    assert scalar.grad == 7


def test_adaptive():
    policy, p = ByLast(2.0, ceiling=100.0), parameter()
    found = [clip([p], policy, norm).norm_after for norm in (500.0, 500.0, 10.0, 90.0, 0.0, 30.0)]
    assert found == pytest.approx([100.0, 100.0, 10.0, 20.0, 0.0, 30.0])
    resumed = ByLast(2.0, ceiling=100.0)
    resumed.load_state_dict(policy.state_dict())
    assert clip([p], resumed, 99.0).norm_after == pytest.approx(60.0)


def test_adaptive_inherits_every_setting():
    ps = [parameter(), parameter()]
    policy = ByLast(1.0, per_parameter=True, warmup=2, floor=2.0, p=1.0)
    for norms in ((1.0, 10.0), (1.0, 10.0)):
        clip(ps, policy, *norms)
    report = clip(ps, policy, 50.0, 50.0)
    ratio = gradient(1.0).norm(p=1).item()
    assert report.norms_after == pytest.approx({"0": 2.0, "1": 10.0 * ratio})
    with pytest.raises(gradrein.errors.ArgumentError, match="swap them"):
        ByLast(1.0, floor=2, ceiling=1)
    with pytest.raises(TypeError, match="abstract"):
        AdaptivePolicy()


def test_in_a_clipper_and_around_by_others():
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=1.0)
    clipper = gradrein.Clipper(optimizer, gradrein.policies.SkipSpikes(ByLast(2.0)))
    p.grad = gradient(1.0)
    optimizer.step()
    assert clipper.report.norm_after == pytest.approx(1.0)
    assert clipper.state_dict()["*"]["inner"]["policy"] == "ByLast"


def test_no_private_name_was_imported():
    for node in ast.walk(ast.parse(Path(__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gradrein"):
            assert not any(part.startswith("_") for part in node.module.split("."))
            assert all(name.name in gradrein.policies.__all__ for name in node.names)
