"""Ways to a clipped gradient: each takes a problem and returns a step that ends with it in ``.grad``.

The clipped gradient is the mean over samples of ``g * min(1, 1 / norm(g))``. A method that cannot run a model
raises; the caller writes down why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

import gradrein

if TYPE_CHECKING:
    from persample_models import Problem

Step = Callable[[], None]


def plain(p: Problem) -> Step:
    def step() -> None:
        p.model.zero_grad()
        p.losses(p.model(p.x), p.y).mean().backward()

    return step


def products(p: Problem) -> Step:
    """The matrix products of a plain step of a multilayer perceptron and nothing else: no step can take less."""
    if not isinstance(p.model, nn.Sequential) or any(type(m) not in (nn.Linear, nn.ReLU) for m in p.model):
        raise NotImplementedError("counted for the multilayer perceptron alone")
    layers = [layer for layer in p.model if isinstance(layer, nn.Linear)]
    inputs = [torch.randn(len(p.x), layer.in_features) for layer in layers]
    gradients = [torch.randn(len(p.x), layer.out_features) for layer in layers]

    @torch.no_grad()
    def step() -> None:
        for layer, x in zip(layers, inputs, strict=True):
            torch.addmm(layer.bias, x, layer.weight.T)
        for layer, g in zip(layers[1:], gradients[1:], strict=True):
            torch.mm(g, layer.weight)
        made = [torch.mm(g.T, x) for g, x in zip(gradients, inputs, strict=True)]
        del made  # held until the end, as gradients are

    return step


def gradrein_clip(p: Problem) -> Step:
    def step() -> None:
        p.model.zero_grad()
        gradrein.per_sample(p.losses(p.model(p.x), p.y), p.model, retain_graph=False).clip_(1.0)

    return step


def compiled_clip(p: Problem, backend: str) -> Step:
    """Call until it is settled how the step runs: `step.info` says how, and after how many seconds."""

    def clip(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return gradrein.per_sample(p.losses(p.model(x), y), p.model, retain_graph=False).clip_(1.0)

    clip = gradrein.compile(clip, p.model, backend=backend)

    def step() -> None:
        p.model.zero_grad()
        clip(p.x, p.y)

    for _ in range(20):
        step()
    step.info = clip.explain()
    return step


def gradrein_captured(p: Problem) -> Step:
    return compiled_clip(p, "captured")


def gradrein_compiled(p: Problem) -> Step:
    return compiled_clip(p, "inductor")


def gradrein_fastest(p: Problem) -> Step:
    return compiled_clip(p, "fastest")


def plain_compiled(p: Problem) -> Step:
    torch._dynamo.reset()
    loss = torch.compile(lambda x, y: p.losses(p.model(x), y).mean())

    def step() -> None:
        p.model.zero_grad()
        loss(p.x, p.y).backward()

    return step


def gradrein_norms(p: Problem) -> Step:
    def step() -> None:
        gradrein.per_sample(p.losses(p.model(p.x), p.y), p.model).norms()

    return step


def gradrein_grads(p: Problem) -> Step:
    def step() -> None:
        gradrein.per_sample(p.losses(p.model(p.x), p.y), p.model, retain_graph=False).grads()

    return step


def clip_written(parameters: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Clip gradients that are written down, as their users do."""
    squares = sum(g.flatten(1).square().sum(1) for _, g in parameters)
    factors = (1.0 / squares.sqrt().clamp(min=1e-12)).clamp(max=1.0) / len(squares)
    for parameter, g in parameters:
        parameter.grad = torch.tensordot(factors, g, 1)


def torch_func(p: Problem, *, clip: bool = True, compiled: bool = False) -> Step:
    from torch.func import functional_call, grad, vmap

    named = dict(p.model.named_parameters())
    detached = {name: q.detach() for name, q in named.items()}

    def loss(parameters, x, y):  # type: ignore[no-untyped-def]
        return p.losses(functional_call(p.model, parameters, (x[None],)), y[None]).squeeze(0)

    each = vmap(grad(loss), in_dims=(None, 0, 0))
    each = torch.compile(each) if compiled else each

    def step() -> None:
        grads = each(detached, p.x, p.y)
        if clip:
            clip_written([(named[name], g) for name, g in grads.items()])

    return step


def torch_func_compiled(p: Problem) -> Step:
    return torch_func(p, compiled=True)


def torch_func_grads(p: Problem) -> Step:
    return torch_func(p, clip=False)


def expanded_weights(p: Problem) -> Step:
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    def step() -> None:
        for q in p.model.parameters():
            q.grad_sample = None
        out = call_for_per_sample_grads(p.model, batch_size=len(p.x))(p.x)
        p.losses(out, p.y).sum().backward()
        clip_written([(q, q.grad_sample) for q in p.model.parameters()])
        for q in p.model.parameters():
            q.grad_sample = None

    return step


def opacus_hooks(p: Problem) -> Step:
    from opacus.grad_sample import GradSampleModule

    wrapped = GradSampleModule(p.model, loss_reduction="sum")

    def step() -> None:
        wrapped.zero_grad()
        p.losses(wrapped(p.x), p.y).sum().backward()
        clip_written([(q, q.grad_sample) for q in p.model.parameters()])
        for q in p.model.parameters():
            q.grad_sample = None

    return step


def opacus_ghost(p: Problem) -> Step:
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
        GradSampleModuleFastGradientClipping,
    )

    wrapped = GradSampleModuleFastGradientClipping(
        p.model, max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="sum"
    )

    def step() -> None:
        wrapped.zero_grad()
        wrapped.enable_hooks()
        losses = p.losses(wrapped(p.x), p.y)
        losses.sum().backward(retain_graph=True)
        wrapped.zero_grad()
        factors = wrapped.get_clipping_coef()
        wrapped.disable_hooks()
        (factors * losses).mean().backward()

    return step


def backpack_batch_grad(p: Problem) -> Step:
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    extend(p.model)

    def step() -> None:
        p.model.zero_grad()
        losses = p.losses(p.model(p.x), p.y)
        with backpack(BatchGrad()):
            losses.sum().backward()
        clip_written([(q, q.grad_batch) for q in p.model.parameters()])
        for q in p.model.parameters():
            del q.grad_batch

    return step


def jax_vmap(p: Problem) -> Step:
    from persample_jax import clipped_step

    return clipped_step(p)


METHODS = {
    "plain": plain,
    "plain compiled": plain_compiled,
    "products": products,
    "gradrein": gradrein_clip,
    "gradrein captured": gradrein_captured,
    "gradrein compiled": gradrein_compiled,
    "gradrein fastest": gradrein_fastest,
    "gradrein norms": gradrein_norms,
    "gradrein grads": gradrein_grads,
    "torch.func": torch_func,
    "torch.func compiled": torch_func_compiled,
    "torch.func grads": torch_func_grads,
    "ExpandedWeights": expanded_weights,
    "Opacus hooks": opacus_hooks,
    "Opacus ghost": opacus_ghost,
    "BackPACK": backpack_batch_grad,
    "JAX": jax_vmap,
}
# These end without a clipped gradient, so there is none to compare.
NOT_CLIPPED = {"plain", "plain compiled", "products", "gradrein norms", "gradrein grads", "torch.func grads"}
# These write down the gradients of all samples.
WRITE_ALL = {
    "gradrein grads",
    "torch.func",
    "torch.func compiled",
    "torch.func grads",
    "ExpandedWeights",
    "Opacus hooks",
    "BackPACK",
    "JAX",
}
