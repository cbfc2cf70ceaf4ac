"""The models in plain JAX: `jit` of `vmap(grad)` with clipping, the anchor of speed."""

from __future__ import annotations

from functools import partial, singledispatch
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import nn

from persample_models import Attention, Gpt, Language, LlamaBlock, Recurrent, Residual

if TYPE_CHECKING:
    from persample_methods import Step
    from persample_models import Problem

Values = dict[str, Any]


def clipped_step(p: Problem) -> Step:
    """Return a step that ends with the clipped gradient in ``.grad``, of which only the last one is copied there."""
    named = dict(p.model.named_parameters())
    values = {name: jnp.asarray(q.detach().numpy()) for name, q in named.items()}
    x, y = jnp.asarray(p.x.numpy()), jnp.asarray(p.y.numpy())

    def loss(values: Values, x: Any, y: Any) -> Any:
        scores = jax.nn.log_softmax(run(p.model, values, "", x))
        return -jnp.take_along_axis(scores, y[..., None], -1).mean()

    @jax.jit
    def clipped(values: Values, x: Any, y: Any) -> Values:
        grads = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(values, x, y)
        norms = jnp.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in grads.values()))
        factors = jnp.minimum(1.0, 1.0 / norms) / len(norms)
        return {name: jnp.tensordot(factors, g, 1) for name, g in grads.items()}

    def step() -> None:
        found = jax.block_until_ready(clipped(values, x, y))
        for name, g in found.items():
            named[name].grad = torch.from_numpy(np.asarray(g).copy())

    return step


@singledispatch
def run(module: nn.Module, values: Values, path: str, x: Any) -> Any:
    """Return what a module computes for one sample, with parameters that are called `path` and their name in it."""
    raise NotImplementedError(f"{type(module).__name__} is not written in JAX")


def inside(module: nn.Module, values: Values, path: str, name: str, x: Any) -> Any:
    return run(module.get_submodule(name), values, f"{path}{name}.", x)


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal, (heads, tokens, size) each."""
    scores = q @ k.transpose(0, 2, 1) / q.shape[-1] ** 0.5
    return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)) @ v


@run.register
def _(module: nn.Sequential, values: Values, path: str, x: Any) -> Any:
    for name, _ in module.named_children():
        x = inside(module, values, path, name, x)
    return x


@run.register
def _(module: nn.Linear, values: Values, path: str, x: Any) -> Any:
    out = x @ values[f"{path}weight"].T
    return out if module.bias is None else out + values[f"{path}bias"]


@run.register
def _(module: nn.Conv2d, values: Values, path: str, x: Any) -> Any:
    padding = [(size, size) for size in module.padding]
    out = lax.conv_general_dilated(x[None], values[f"{path}weight"], module.stride, padding)[0]
    return out if module.bias is None else out + values[f"{path}bias"][:, None, None]


@run.register
def _(module: nn.GroupNorm, values: Values, path: str, x: Any) -> Any:
    groups = x.reshape(module.num_groups, -1)
    groups = (groups - groups.mean(1, keepdims=True)) * lax.rsqrt(groups.var(1, keepdims=True) + module.eps)
    return groups.reshape(x.shape) * values[f"{path}weight"][:, None, None] + values[f"{path}bias"][:, None, None]


@run.register
def _(module: nn.LayerNorm, values: Values, path: str, x: Any) -> Any:
    x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + module.eps)
    return x * values[f"{path}weight"] + values[f"{path}bias"]


@run.register
def _(_: nn.ReLU, __: Values, ___: str, x: Any) -> Any:
    return jax.nn.relu(x)


@run.register
def _(_: nn.GELU, __: Values, ___: str, x: Any) -> Any:
    return jax.nn.gelu(x, approximate=False)


@run.register(nn.Identity)
@run.register(nn.Flatten)
def _(_: nn.Module, __: Values, ___: str, x: Any) -> Any:
    return x


@run.register
def _(_: nn.AdaptiveAvgPool2d, __: Values, ___: str, x: Any) -> Any:
    return x.mean((1, 2))


@run.register
def _(module: Residual, values: Values, path: str, x: Any) -> Any:
    part = partial(inside, module, values, path)
    return jax.nn.relu(part("inner", x) + part("short", x))


@run.register
def _(module: Attention, values: Values, path: str, x: Any) -> Any:
    part, (t, d) = partial(inside, module, values, path), x.shape
    q, k, v = part("qkv", part("norm1", x)).reshape(t, 3, module.heads, -1).transpose(1, 2, 0, 3)
    x = x + part("out", attention(q, k, v).transpose(1, 0, 2).reshape(t, d))
    return x + part("down", part("act", part("up", part("norm2", x))))


@run.register
def _(module: Gpt, values: Values, path: str, ids: Any) -> Any:
    x = values[f"{path}words.weight"][ids] + values[f"{path}places.weight"][: len(ids)]
    part = partial(inside, module, values, path)
    return part("head", part("norm", part("blocks", x)))


@run.register
def _(module: Recurrent, values: Values, path: str, x: Any) -> Any:
    lstm = f"{path}lstm."
    to_gates, biases = values[f"{lstm}weight_hh_l0"].T, values[f"{lstm}bias_ih_l0"] + values[f"{lstm}bias_hh_l0"]
    from_input = x @ values[f"{lstm}weight_ih_l0"].T + biases

    def advance(state: Any, row: Any) -> Any:
        h, c = state
        i, f, g, o = jnp.split(row + h @ to_gates, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    nothing = jnp.zeros(module.lstm.hidden_size)
    (h, _), _ = lax.scan(advance, (nothing, nothing), from_input)
    return inside(module, values, path, "head", h)


@run.register
def _(module: nn.RMSNorm, values: Values, path: str, x: Any) -> Any:
    eps = jnp.finfo(x.dtype).eps if module.eps is None else module.eps
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * values[f"{path}weight"]


@run.register
def _(module: LlamaBlock, values: Values, path: str, x: Any) -> Any:
    part, (t, d) = partial(inside, module, values, path), x.shape
    cos, sin = (jnp.asarray(some.numpy())[:t] for some in (module.cos, module.sin))

    def rotated(rows: Any) -> Any:
        first, second = jnp.split(rows, 2, -1)
        return rows * cos + jnp.concatenate([-second, first], -1) * sin

    h, shared = part("norm1", x), module.heads // module.groups
    q = rotated(part("q", h).reshape(t, module.heads, -1).transpose(1, 0, 2))
    k = rotated(part("k", h).reshape(t, module.groups, -1).transpose(1, 0, 2)).repeat(shared, 0)
    v = part("v", h).reshape(t, module.groups, -1).transpose(1, 0, 2).repeat(shared, 0)
    x = x + part("out", attention(q, k, v).transpose(1, 0, 2).reshape(t, d))
    h = part("norm2", x)
    return x + part("down", jax.nn.silu(part("gate", h)) * part("up", h))


@run.register
def _(module: Language, values: Values, path: str, ids: Any) -> Any:
    part = partial(inside, module, values, path)
    return part("head", part("norm", part("blocks", values[f"{path}words.weight"][ids])))
