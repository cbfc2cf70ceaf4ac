"""What is timed: contenders take turns, and the result is the median of their ratios with quartiles."""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import gradrein

from ._models import GPT, cnn, losses, mlp

_ROUNDS = 15


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def _quartiles(numbers: list[float]) -> list[float]:
    return [round(q, 3) for q in statistics.quantiles(numbers, n=4)]


def take_turns(contenders: dict[str, Callable[[], Any]], device: torch.device) -> dict[str, list[float]]:
    """Return for each contender the quartiles of its time over that of the first, and of the first in milliseconds."""
    for run in contenders.values():
        for _ in range(3):
            run()
    first, *others = contenders
    rounds = [{name: _seconds(run, device) for name, run in contenders.items()} for _ in range(_ROUNDS)]
    ratios = {name: _quartiles([turn[name] / turn[first] for turn in rounds]) for name in others}
    return {f"{first}, ms": _quartiles([1e3 * turn[first] for turn in rounds]), **ratios}


def clipping(device: torch.device) -> Iterator[tuple[str, dict[str, Callable[[], Any]]]]:
    """Yield the contenders for clipping by norm, clipped."""
    for count, shape in ((300, (32, 32)), (24, (768, 768))):
        for dtype in (torch.float32, torch.bfloat16):
            parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) for _ in range(count)]
            for p in parameters:
                p.grad = torch.randn_like(p)
            name = f"clip {count} of {shape[0]} x {shape[1]}, {str(dtype).removeprefix('torch.')}"
            theirs, ours = nn.utils.clip_grad_norm_, gradrein.clip_grad_norm_
            yield name, {"torch": partial(theirs, parameters, 1.0), "gradrein": partial(ours, parameters, 1.0)}


def per_sample(device: torch.device) -> Iterator[tuple[str, dict[str, Callable[[], Any]]]]:
    """Yield the contenders for a step that clips each sample."""
    problems: dict[str, tuple[nn.Module, Any, Any]] = {
        "MLP 256": (mlp(512), torch.randn(256, 8), torch.randint(4, (256,))),
        "CNN 32": (cnn(), torch.randn(32, 3, 7, 7), torch.randint(4, (32,))),
        "GPT 16": (GPT(128, 2, 500, 64), torch.randint(500, (16, 64)), torch.randint(500, (16, 64))),
    }
    for name, (model, x, y) in problems.items():
        model, x, y = model.to(device), x.to(device), y.to(device)
        yield (
            f"step {name}",
            {
                "plain": _plain(model, x, y),
                "gradrein": _clipped(model, x, y),
                "torch.func": _func(model, x, y),
                **_opacus(model, x, y),
            },
        )


def _plain(model: nn.Module, x: Any, y: Any) -> Callable[[], Any]:
    def step() -> None:
        model.zero_grad()
        losses(model, x, y).mean().backward()  # type: ignore[no-untyped-call]

    return step


def _clipped(model: nn.Module, x: Any, y: Any) -> Callable[[], Any]:
    def step() -> None:
        model.zero_grad()
        gradrein.per_sample(losses(model, x, y), model, retain_graph=False).clip_(1.0)

    return step


def _func(model: nn.Module, x: Any, y: Any) -> Callable[[], Any]:
    values = {name: p.detach() for name, p in model.named_parameters()}

    def one(values: Any, x: Any, y: Any) -> Any:
        logits = torch.func.functional_call(model, values, (x[None],))
        return nn.functional.cross_entropy(logits, y[None])

    each = torch.func.vmap(torch.func.grad(one), (None, 0, 0))

    def step() -> None:
        grads = each(values, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        weights = (1.0 / norms).clamp(max=1) / len(norms)
        for name, p in model.named_parameters():
            p.grad = torch.tensordot(weights, grads[name], 1)

    return step


def _opacus(model: nn.Module, x: Any, y: Any) -> dict[str, Callable[[], Any]]:
    try:
        import copy

        from opacus import GradSampleModule  # type: ignore[import-not-found, unused-ignore]

        wrapped = GradSampleModule(copy.deepcopy(model))
    except Exception:  # not installed, or a layer it does not take
        return {}

    def step() -> None:
        wrapped.zero_grad()
        losses(wrapped, x, y).sum().backward()  # type: ignore[no-untyped-call]
        parameters = [p for p in wrapped.parameters() if getattr(p, "grad_sample", None) is not None]
        norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in parameters]).norm(dim=0)
        weights = (1.0 / norms).clamp(max=1) / len(norms)
        for p in parameters:
            p.grad = torch.tensordot(weights, p.grad_sample, 1)
            p.grad_sample = None

    return {"Opacus": step}
