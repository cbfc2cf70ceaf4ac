"""The slow, obviously correct twin of everything in the clip room: one vector, float64."""

import math

import torch


def parameters(grads):
    """A parameter for each gradient (None stays without one)."""
    found = []
    for g in grads:
        p = torch.nn.Parameter(torch.zeros(1)) if g is None else torch.nn.Parameter(torch.zeros_like(dense(g)))
        if g is not None:
            p.grad = g
        found.append(p)
    return found


def dense(g):
    return g.to_dense() if g.layout is not torch.strided else g


def vector(grads):
    """All gradients as one float64 (or complex128) vector."""
    parts = [dense(g).detach().clone().reshape(-1) for g in grads if g is not None]
    wide = torch.complex128 if any(t.is_complex() for t in parts) else torch.float64
    return torch.cat([t.to(wide) for t in parts]) if parts else torch.zeros(0, dtype=wide)


def norm(grads, p):
    """The p-norm of everything, scaled so that no power overflows."""
    x = vector(grads).abs().to(torch.float64)
    top = x.max().item() if x.numel() else 0.0
    if top == 0 or not math.isfinite(top):
        return math.nan if x.isnan().any() else top
    return top * torch.linalg.vector_norm(x / top, p).item()


def clipped(grads, max_norm, p, eps=1e-6):
    """The gradients after clipping, as one vector."""
    total = norm(grads, p)
    return vector(grads) * min(1.0, max_norm / (total + eps))
