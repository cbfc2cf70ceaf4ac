"""The slow, obviously right twin: one backward pass per sample."""

import torch


def loop(losses, parameters):
    """Return name -> (samples, *shape), by differentiating every loss alone."""
    losses = losses.flatten(1).sum(1) if losses.dim() > 1 else losses
    rows = []
    for loss in losses:
        found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
        rows.append([None if g is None else g.to_dense() if g.is_sparse else g for g in found])
    return {
        name: torch.stack([row[i] if row[i] is not None else torch.zeros_like(p) for row in rows])
        for i, (name, p) in enumerate(parameters.items())
        if any(row[i] is not None for row in rows)
    }


def flat(gradients):
    """Return name -> (samples, *shape) as one matrix (samples, everything)."""
    return torch.cat([g.reshape(len(g), g[:1].numel()) for g in gradients.values()], 1)
