"""What the ranks run: policies that look inside gradients, for some steps, against one process that has them whole."""

import layouts
import torch
import torch.distributed as dist
from layouts import reduced, spread

import bridle

POLICIES = {
    "by_unit": lambda: bridle.by_unit(0.05),
    "by_unit of columns": lambda: bridle.by_unit(0.05, unit_dims=1),
    "ByElementSpike": lambda: bridle.policies.ByElementSpike(theta=1.5, decay=0.5, warmup=1),
    "ByOvershoot": lambda: bridle.policies.ByOvershoot(rate=1.0, start=0.5),
    "two of them": lambda: {"p0": bridle.by_unit(0.05), "*": bridle.policies.ByElementSpike(theta=1.5, warmup=1)},
}
STEPS = 4


def whole_step(case, step):
    """Weights and gradients of a step, whole: name -> (weight, gradient)."""
    generator = torch.Generator().manual_seed(1000 * case["seed"] + step)
    dtype = case.get("dtype", torch.float32)
    return {
        f"p{k}": tuple(torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
        for k, (shape, *_) in enumerate(case["tensors"])
    }


def set_step(case, parameters, step):
    """Move spread parameters to where they are in a step, and give them its gradients."""
    for (name, (weight, grad)), (_, where, letters, missing) in zip(
        whole_step(case, step).items(), case["tensors"], strict=True
    ):
        p = parameters[name]
        with torch.no_grad():
            p.copy_(weight if where == "plain" else spread(weight, where, reduced(letters)))
        lacks = dist.get_rank() in missing
        p.grad = None if lacks else grad.clone() if where == "plain" else spread(grad, where, letters)


def set_whole(case, parameters, step):
    for (name, (weight, grad)), (_, where, letters, missing) in zip(
        whole_step(case, step).items(), case["tensors"], strict=True
    ):
        parameters[name].data.copy_(weight)
        held = layouts.without(grad, where, letters, missing) if missing else grad
        parameters[name].grad = held.clone()


def blank(case, is_spread):
    found = {}
    for k, (shape, where, letters, _) in enumerate(case["tensors"]):
        zeros = torch.zeros(shape, dtype=case.get("dtype", torch.float32))
        found[f"p{k}"] = torch.nn.Parameter(
            spread(zeros, where, reduced(letters)) if is_spread and where != "plain" else zeros
        )
    return found


def as_in_one_process(case, name, dry_run=False):
    """Every step leaves the same gradients and reports the same norms."""
    ours, alone = POLICIES[name](), POLICIES[name]()
    mine, whole = blank(case, True), blank(case, False)
    for step in range(STEPS):
        set_step(case, mine, step)
        set_whole(case, whole, step)
        found = bridle.clip_(mine, ours, dry_run=dry_run)
        expected = bridle.clip_(whole, alone, dry_run=dry_run)
        assert found.clipped == expected.clipped or step == 0
        for what in ("norms", "norms_after"):
            for key, norm in getattr(expected, what).items():
                layouts.close(getattr(found, what)[key], norm, 5)
        layouts.close(found.norm_after, expected.norm_after, 5)
        layouts.assert_same_everywhere(found.norm_after)
        layouts.assert_clipped(mine, [p.grad for p in whole.values()], 1.0, case)
