"""What the ranks run when something is wrong on one of them."""

import math

import layouts
import placements
import torch
import torch.distributed as dist
from persample_cases import counted

import gradrein

SPREAD = {"seed": 3, "tensors": [((8, 3), "line", "0", ()), ((5,), "line", "r", ()), ((4,), "plain", "", ())]}


def sick(value, at=1):
    """Gradients in pieces; the piece of one rank holds two values that are not finite."""
    parameters, _ = layouts.build(SPREAD)
    if dist.get_rank() == at:
        layouts.piece(parameters["p0"].grad).view(-1)[:2] = value
    return parameters


def pieces(parameters):
    return [layouts.piece(p.grad).clone() for p in parameters.values()]


def nonfinite(mode, value):
    """Every rank decides the same, and knows the name and the count, whoever holds the value."""
    parameters = sick(value)
    before = pieces(parameters)
    kind, text = placements.error(lambda: gradrein.clip_(parameters, gradrein.by_norm(0.1), nonfinite=mode))
    after = pieces(parameters)
    if mode == "raise":
        assert kind == "NonFiniteGradientError"
        assert "p0 (2 values)" in text
        assert all(torch.equal(a, b) or a.isnan().any() or b.isinf().any() for a, b in zip(after, before, strict=True))
    elif mode == "skip":
        assert not any(t.any() for t in after)
    elif mode == "zero":
        wholes = [t.nan_to_num(0.0, 0.0, 0.0) for t in before]
        assert all(t.isfinite().all() for t in after)
        factor = after[2][0] / wholes[2][0]
        for a, b in zip(after, wholes, strict=True):
            torch.testing.assert_close(a, b * factor)
    else:
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(after, before, strict=True))
    return kind


def nonfinite_by_torchs_name(value):
    parameters = sick(value)
    before = pieces(parameters)
    kind, text = placements.error(lambda: gradrein.clip_grad_norm_(parameters.values(), 0.1, error_if_nonfinite=True))
    assert kind == "NonFiniteGradientError"
    assert "parameter 0 (2 values)" in text
    assert all(
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(pieces(parameters), before, strict=True)
    )
    for p in (math.inf, 2.0):  # a maximum may lose a NaN
        assert gradrein.get_total_norm([q.grad for q in parameters.values()], p).isnan() == math.isnan(value)
        assert not math.isfinite(gradrein.clip_grad_norm_(sick(value), 0.1, p).item())


def nan_in_another_stage(mode):
    rank = dist.get_rank()
    mine = placements.grads((f"layer{rank}", [math.nan if rank == 1 else 1.0]))
    kind, text = placements.error(
        lambda: gradrein.clip_(
            mine, gradrein.by_norm(0.1), nonfinite=mode, placement=gradrein.distributed.Disjoint(placements.line())
        )
    )
    if mode == "raise":
        assert kind == "NonFiniteGradientError"
        assert ("layer1 (1 value)" if rank == 1 else "on another rank") in text
    else:
        assert kind == "nothing"
        assert not mine[f"layer{rank}"].grad.nan_to_num(5.0).any()


def nan_in_one_mesh():
    """A gradient lies on a small mesh with process groups of its own, and one of the meshes that hold it has a NaN."""
    case = {"seed": 0, "tensors": [((5, 3), "line", "0", ()), ((4, 4), "2d/a", "0", ())]}
    parameters, _ = layouts.build(case)
    if dist.get_rank() == 0:
        parameters["p1"].grad.to_local()[0, 0] = math.nan
    assert gradrein.get_total_norm([p.grad for p in parameters.values()]).isnan()
    before = pieces(parameters)
    found = placements.error(lambda: gradrein.clip_(parameters, gradrein.by_norm(0.1)))
    assert all(
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(pieces(parameters), before, strict=True)
    )
    return found


def a_limit_in_parts():
    """A number of which each rank holds a part is refused, one that each holds is taken."""
    limit = layouts.DTensor.from_local(torch.tensor(0.25), layouts.mesh("line"), [layouts.Partial()], run_check=False)
    calls = [
        lambda ps: gradrein.clip_grad_norm_(ps, limit),
        lambda ps: gradrein.clip_grad_value_(ps, limit),
        lambda ps: gradrein.clip_(ps, gradrein.by_unit(limit)),
    ]
    for call in calls:
        parameters, _ = layouts.build(SPREAD)
        before = pieces(parameters)
        kind, text = placements.error(lambda call=call, parameters=parameters: call(parameters))
        assert kind == "ArgumentError"
        assert "Pass its `full_tensor()`" in text
        assert all(torch.equal(a, b) for a, b in zip(pieces(parameters), before, strict=True))
    whole = layouts.DTensor.from_local(torch.tensor(0.25), layouts.mesh("line"), [layouts.Replicate()], run_check=False)
    for policy in (gradrein.by_norm, gradrein.by_value, gradrein.by_rms, gradrein.by_unit):
        found = [layouts.build(SPREAD)[0] for _ in range(2)]
        for parameters, number in zip(found, (whole, 0.25), strict=True):
            gradrein.clip_(parameters, policy(number))
        assert all(torch.equal(a, b) for a, b in zip(*map(pieces, found), strict=True))


def a_norm_in_parts():
    """torch's own function may leave the infinity norm as a DTensor that is still to be reduced."""
    case = {"seed": 3, "tensors": [((8, 3), "line", "0", ())]}
    parameters, wholes = layouts.build(case)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters.values()], math.inf)
    gradrein.clip_grads_with_norm_(parameters, 0.1, norm)
    layouts.assert_clipped(parameters, wholes, 0.1 / (wholes[0].abs().max().item() + 1e-6), case)


def partial_of_a_nan():
    """A NaN in one rank's summand is a NaN of the gradient."""
    parameters, _ = layouts.build({"seed": 3, "tensors": [((4, 3), "line", "p", ())]})
    if dist.get_rank() == 1:
        parameters["p0"].grad.to_local()[0, 0] = math.nan
    gradrein.clip_(parameters, gradrein.by_norm(1e6), nonfinite="skip")
    assert not layouts.piece(parameters["p0"].grad).any()


def values():
    """Clipping by value: every piece."""
    case = {"seed": 3, "tensors": [((4, 3), "line", "r", ()), ((5, 3), "line", "0", ())]}
    parameters, wholes = layouts.build(case)
    kept = [p.grad for p in parameters.values()]
    gradrein.clip_grad_value_(parameters, 0.5)
    assert all(p.grad is k for p, k in zip(parameters.values(), kept, strict=True))
    layouts.assert_clipped(parameters, [t.clamp(-0.5, 0.5) for t in wholes], 1.0, case)


def extremes():
    """Finite gradients whose powers are not: float64 over ranks, any order."""
    for size in (1e200, 1e-200):
        for p in (1.0, 2.0, 3.5, 50.0, math.inf):
            case = {"seed": 3, "tensors": [((8, 3), "line", "0", ()), ((5,), "plain", "", ())], "size": size}
            parameters, wholes = layouts.build(case | {"dtype": torch.float64})
            layouts.close(gradrein.clip_grad_norm_(parameters, 1.0, p).item(), layouts.norm_of(wholes, p), 12)


def plain_gradients_are_not_sent():
    """As under DDP, where ranks need not even call at the same time."""
    parameters, _ = layouts.build({"seed": 1, "tensors": [((8,), "plain", "", ())] * 3})
    with counted() as calls:
        gradrein.clip_grad_norm_(parameters, 1.0)
        gradrein.clip_(parameters, gradrein.by_norm(0.5))
    assert calls == []


def many():
    """More parameters than one message holds."""
    case = {"seed": 3, "tensors": [((2, 2), "line", "0", ())] * 1500}
    parameters, wholes = layouts.build(case)
    layouts.close(gradrein.clip_grad_norm_(parameters, 1.0).item(), layouts.norm_of(wholes, 2.0), 6)
