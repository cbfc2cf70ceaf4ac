"""The slow, obviously right twin: one backward pass per sample."""

import torch


def gradients(loss, tensors):
    return torch.autograd.grad(loss, tensors, retain_graph=True, allow_unused=True)


def loop(losses, parameters):
    """Return name -> (samples, *shape), by differentiating every loss alone."""
    losses = losses.flatten(1).sum(1) if losses.dim() > 1 else losses
    rows = []
    for loss in losses:
        found = gradients(loss, list(parameters.values()))
        rows.append([None if g is None else g.to_dense() if g.is_sparse else g for g in found])
    return {
        name: torch.stack([row[i] if row[i] is not None else torch.zeros_like(p) for row in rows])
        for i, (name, p) in enumerate(parameters.items())
        if any(row[i] is not None for row in rows)
    }


def flat(gradients):
    """Return name -> (samples, *shape) as one matrix (samples, everything)."""
    return torch.cat([g.reshape(len(g), g[:1].numel()) for g in gradients.values()], 1)


def grouped(rows, groups):
    """Return name -> (groups, ...): the sums over the samples of each group, in ascending order."""
    if groups is None:
        return rows
    members = [groups == number for number in groups.unique()]
    return {name: torch.stack([value[own].sum(0) for own in members]) for name, value in rows.items()}


ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


def close(found, expected, dtype, what):
    """Compare up to the rounding of a dtype, relative to the largest number there is."""
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    found, expected = found.double(), expected.double()
    size = expected.abs().max().item() if expected.numel() else 0.0
    apart = (found - expected).abs().max().item() if expected.numel() else 0.0
    assert apart <= ROUNDING[dtype] * max(size, 1e-3), f"{what}: off by {apart:.3g}, the largest number is {size:.3g}"
