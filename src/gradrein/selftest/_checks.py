"""What is checked: each a function of the device that raises where a number or a refusal is wrong."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradrein

from .. import policies
from ..errors import BatchCouplingError, NonFiniteGradientError
from ._models import MODELS, batch, losses

Check = Callable[[torch.device], None]
CHECKS: dict[str, Check] = {}
_SHAPES = [(16, 8), (16,), (4, 3, 3, 3), (1,), (0, 5)]


def check(name: str) -> Callable[[Check], Check]:
    """Add a check under a name that a table can show."""

    def add(function: Check) -> Check:
        CHECKS[name] = function
        return function

    return add


def gradients(device: torch.device, dtype: torch.dtype = torch.float32, by: float = 1.0) -> list[nn.Parameter]:
    """Return parameters with gradients, the same numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) for shape in _SHAPES]
    for p in parameters:
        p.grad = (torch.randn(p.shape, generator=generator) * by).to(device, dtype)
    return parameters


def _expect(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    pairs = zip(actual, expected, strict=True) if isinstance(actual, list | tuple) else [(actual, expected)]
    for one, other in pairs:
        other = other.to(one.device, one.dtype) if isinstance(other, Tensor) else other
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def _norm(parameters: list[nn.Parameter], p: float) -> Tensor:
    every = torch.cat([q.grad.detach().cpu().double().flatten() for q in parameters if q.grad is not None])
    norm: Tensor = torch.linalg.vector_norm(every, p)
    return norm


def _clip_norm(p: float, dtype: torch.dtype) -> Check:
    def run(device: torch.device) -> None:
        parameters = gradients(device, dtype)
        before, norm = [q.grad.double() for q in parameters if q.grad is not None], _norm(parameters, p)
        _expect(gradrein.clip_grad_norm_(parameters, 0.5, p).cpu().double(), norm)
        factor = 0.5 / (norm.item() + 1e-6)
        tolerance = 1e-5 if dtype == torch.float32 else 8e-3
        _expect([q.grad.double() for q in parameters if q.grad is not None], [g * factor for g in before], tolerance)

    return run


for _p in (1.0, 2.0, 3.0, math.inf):
    for _dtype in (torch.float32, torch.bfloat16):
        CHECKS[f"clip_grad_norm_, order {_p:g}, {str(_dtype).removeprefix('torch.')}"] = _clip_norm(_p, _dtype)


@check("a norm that float32 does not hold")
def large_norm(device: torch.device) -> None:
    """Values near the largest float32: their norm exceeds it, and clipping must not lose them."""
    p = nn.Parameter(torch.zeros(2, device=device))
    p.grad = torch.full_like(p, 3e38)
    gradrein.clip_grad_norm_([p], 1.0)
    _expect(p.grad.cpu(), torch.full((2,), 0.5**0.5))
    clipped, _ = gradrein.clip_by_global_norm([torch.full((2,), 3e38, device=device)], 1.0)
    _expect(clipped[0].cpu(), torch.full((2,), 0.5**0.5))


@check("clip_grad_value_")
def clip_value(device: torch.device) -> None:
    """Every element is limited."""
    parameters = gradients(device)
    expected = [q.grad.clamp(-0.3, 0.3) for q in parameters if q.grad is not None]
    gradrein.clip_grad_value_(parameters, 0.3)
    _expect([q.grad for q in parameters], expected)


_POLICIES: dict[str, Callable[[], Any]] = {
    "by_norm": lambda: gradrein.by_norm(0.5),
    "by_norm per parameter": lambda: gradrein.by_norm(0.5, per_parameter=True),
    "by_value": lambda: policies.by_value(0.3),
    "by_unit": lambda: policies.by_unit(0.5),
    "by_rms": lambda: policies.by_rms(0.5),
    "ByMedian": lambda: policies.ByMedian(warmup=2),
    "ByOvershoot (auto)": lambda: policies.ByOvershoot(),
}


def _as_on_the_cpu(make: Callable[[], Any], nonfinite: str, bad: bool) -> Check:
    def steps(device: torch.device) -> list[Tensor]:
        policy, out = make(), []
        for step in range(4):
            parameters = gradients(device, by=10.0 if step == 3 else 1.0)
            if bad and step == 2:
                parameters[0].grad[0, 0] = math.nan  # type: ignore[index]
            gradrein.clip_(parameters, policy, nonfinite=nonfinite)  # type: ignore[arg-type]
            out += [q.grad.nan_to_num(7.0) for q in parameters if q.grad is not None]
        return out

    return lambda device: _expect(steps(device), steps(torch.device("cpu")))


for _name, _make in _POLICIES.items():
    CHECKS[f"clip_, {_name}"] = _as_on_the_cpu(_make, "skip", False)
for _mode in ("skip", "zero", "propagate"):
    CHECKS[f"clip_, a NaN, {_mode}"] = _as_on_the_cpu(_POLICIES["by_norm"], _mode, True)


def _per_sample(name: str) -> Check:
    def run(device: torch.device) -> None:
        torch.manual_seed(0)
        model = MODELS[name]().to(device)
        x, y = (t.to(device) for t in batch(name, 6))
        each = losses(model, x, y)
        parameters = list(model.parameters())
        rows = [torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True) for loss in each]
        loop = torch.stack([torch.cat([_flat(g, p) for g, p in zip(row, parameters, strict=True)]) for row in rows])
        for _ in range(2):  # the second time owners are known
            model.zero_grad()
            ps = gradrein.per_sample(losses(model, x, y), model)
            norms, grads = ps.norms(), ps.grads()
            _expect(norms, loop.norm(dim=1), 1e-4)
            _expect(torch.cat([g.flatten(1) for g in grads.values()], 1), loop, 1e-4)
            limit = float(norms.median())
            ps.clip_(limit)
            written = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
            _expect(written, ((limit / norms).clamp(max=1)[:, None] * loop).mean(0), 1e-4)

    return run


def _flat(g: Tensor | None, p: Tensor) -> Tensor:
    return torch.zeros_like(p).flatten() if g is None else g.flatten()


for _name in MODELS:
    CHECKS[f"per_sample, {_name}"] = _per_sample(_name)


def _refused(build: Callable[[torch.device], tuple[nn.Module, Tensor]]) -> Check:
    def run(device: torch.device) -> None:
        for _ in range(2):
            model, each = build(device)
            try:
                gradrein.per_sample(each, model)
            except BatchCouplingError:
                continue
            raise AssertionError("coupled samples were answered")

    return run


def _batch_norm(device: torch.device) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(20, 1)).to(device)
    return model, model(torch.randn(6, 4, 5, device=device)).flatten()


def _batch_as_time(device: torch.device) -> tuple[nn.Module, Tensor]:
    model = nn.LSTM(4, 3).to(device)  # batch_first is forgotten
    return model, model(torch.randn(6, 5, 4, device=device))[0].square().flatten(1).sum(1)


def _keys_of_a_neighbour(device: torch.device) -> tuple[nn.Module, Tensor]:
    model = nn.Linear(8, 8).to(device)
    x = torch.randn(7, 2, 5, 8, device=device)
    attended = F.scaled_dot_product_attention(model(x[1:]), x[:-1], x[:-1])
    return model, attended.flatten(1).square().sum(1)


CHECKS["refused: batch norm in training"] = _refused(_batch_norm)
CHECKS["refused: the batch taken for time"] = _refused(_batch_as_time)
CHECKS["refused: keys of a neighbour"] = _refused(_keys_of_a_neighbour)


@check("the origin of a NaN")
def origin_of_nan(device: torch.device) -> None:
    """The op and the module are named."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).to(device)
    try:
        with gradrein.detect_nonfinite(model):
            gradrein.backward((model(torch.ones(2, 3, device=device)) * 0).sqrt().sum())
    except NonFiniteGradientError as error:
        if "SqrtBackward0" not in str(error):
            raise
        return
    raise AssertionError("a NaN was not found")
