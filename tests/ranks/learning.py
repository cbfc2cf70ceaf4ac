"""What the ranks run: policies that look inside gradients, for some steps, against one process that has them whole."""

import layouts
import torch
import torch.distributed.checkpoint as dcp
from layouts import reduced, spread

import gradrein

POLICIES = {
    "by_unit": lambda: gradrein.by_unit(0.05),
    "by_unit of columns": lambda: gradrein.by_unit(0.05, unit_dims=1),
    "ByOvershoot": lambda: gradrein.policies.ByOvershoot(rate=1.0, start=0.5),
    "two of them": lambda: {"p0": gradrein.by_unit(0.05), "*": gradrein.policies.ByOvershoot(rate=1.0, start=0.5)},
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
    for (name, (weight, grad)), (_, where, letters, _) in zip(
        whole_step(case, step).items(), case["tensors"], strict=True
    ):
        p = parameters[name]
        with torch.no_grad():
            p.copy_(weight if where == "plain" else spread(weight, where, reduced(letters)))
        p.grad = grad.clone() if where == "plain" else spread(grad, where, letters)


def set_whole(case, parameters, step):
    for name, (weight, grad) in whole_step(case, step).items():
        parameters[name].data.copy_(weight)
        parameters[name].grad = grad.clone()


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
        found = gradrein.clip_(mine, ours, dry_run=dry_run)
        expected = gradrein.clip_(whole, alone, dry_run=dry_run)
        assert found.clipped == expected.clipped or step == 0
        for what in ("norms", "norms_after"):
            for key, norm in getattr(expected, what).items():
                layouts.close(getattr(found, what)[key], norm, 5)
        layouts.close(found.norm_after, expected.norm_after, 5)
        layouts.assert_same_everywhere(found.norm_after)
        layouts.assert_clipped(mine, [p.grad for p in whole.values()], 1.0, case)


SAVED = {
    "ByOvershoot": POLICIES["ByOvershoot"],
    "ByMedian": lambda: gradrein.policies.ByMedian(window=4, per_parameter=True, warmup=1),
    "ByZScore": lambda: gradrein.policies.ByZScore(warmup=1),
    "SkipSpikes": lambda: gradrein.policies.SkipSpikes(gradrein.by_norm(1.0), window=4),
}
LINE = {"seed": 5, "tensors": [((6, 3), "line", "0", ()), ((5,), "line", "0", ()), ((3, 4), "plain", "", ())]}


def whole_state(state):
    """A state with every DTensor whole."""
    if isinstance(state, dict):
        return {key: whole_state(value) for key, value in state.items()}
    return state.full_tensor() if hasattr(state, "full_tensor") else state


def clipper_of(name, parameters):
    return gradrein.Clipper(torch.optim.SGD(parameters.items(), lr=0.0), SAVED[name]())


def learn_and_save(name, folder):
    """Four steps, saved by torch.distributed.checkpoint; what was learned, whole, and a fifth step."""
    parameters = blank(LINE, True)
    clipper = clipper_of(name, parameters)
    for step in range(STEPS):
        set_step(LINE, parameters, step)
        clipper.optimizer.step()
    dcp.save({"clipper": clipper.state_dict()}, checkpoint_id=folder)
    return whole_state(clipper.state_dict()), one_more(clipper, parameters)


def load_and_go_on(name, folder):
    """The same from the checkpoint, on however many ranks there are."""
    parameters = blank(LINE, True)
    clipper = clipper_of(name, parameters)
    fresh = whole_state(clipper.state_dict())
    set_step(LINE, parameters, 0)
    clipper.optimizer.step()  # now there is a state to load into
    state = {"clipper": clipper.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    clipper.load_state_dict(state["clipper"])
    assert str(fresh) != str(whole_state(clipper.state_dict()))
    return whole_state(clipper.state_dict()), one_more(clipper, parameters)


def one_more(clipper, parameters):
    set_step(LINE, parameters, STEPS)
    clipper.optimizer.step()
    return clipper.report.norm_after


def load_without_a_step(name, folder):
    """A state that is loaded into nothing is refused."""
    clipper = clipper_of(name, blank(LINE, True))
    state = {"clipper": clipper.state_dict()}
    try:
        dcp.load(state, checkpoint_id=folder)
        clipper.load_state_dict(state["clipper"])
    except BaseException as error:  # that of torch is no Exception
        return type(error).__name__, str(error)
    return "nothing", ""
