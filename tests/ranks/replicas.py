"""What the ranks run when they are not called with the same, ."""

import layouts
import placements
import torch
import torch.distributed as dist

import gradrein

LINE = {"seed": 3, "tensors": [((8, 3), "line", "0", ()), ((7,), "line", "0", ()), ((4, 2), "line", "0", ())]}
SQUARE = {"seed": 3, "tensors": [((8, 6), "2d", "01", ()), ((7, 4), "2d", "0r", ()), ((4, 2), "2d", "10", ())]}
MIXED = {"seed": 3, "tensors": [((8, 3), "line", "0", ()), ((7,), "line", "r", ()), ((4, 2), "plain", "", ())]}
SAME_SHAPES = {"seed": 3, "tensors": [((8, 3), "line", "0", ())] * 3}
CASES = {"line": LINE, "square": SQUARE, "mixed": MIXED, "same shapes": SAME_SHAPES}


def turned(parameters, odd):
    return dict(reversed(parameters.items())) if odd else parameters


def learned(policy, size):
    """A policy that has loaded the state of one that has seen a norm."""
    seen = type(policy)()
    gradrein.clip_(placements.grads(("w", [size])), seen)
    policy.load_state_dict(seen.state_dict())
    return policy


def told(policy, loss):
    policy.see(loss)
    return policy


CALLS = {
    "loaded state": lambda ps, odd: gradrein.clip_(ps, learned(gradrein.policies.ByMedian(), 2.0 if odd else 1.0)),
    "loaded on one rank": lambda ps, odd: gradrein.clip_(
        ps, learned(gradrein.policies.ByMedian(), 1.0) if odd else gradrein.policies.ByMedian()
    ),
    "loaded into an inner policy": lambda ps, odd: gradrein.clip_(
        ps, gradrein.policies.SkipSpikes(learned(gradrein.policies.ByMedian(), 2.0 if odd else 1.0))
    ),
    "loss": lambda ps, odd: gradrein.clip_(ps, told(gradrein.policies.SkipSpikes(), 2.0 if odd else 1.0)),
    "order": lambda ps, odd: gradrein.clip_grad_norm_(list(turned(ps, odd).values()), 0.1),
    "order of names": lambda ps, odd: gradrein.clip_(turned(ps, odd), gradrein.by_norm(0.1, per_parameter=True)),
    "order under torch's name": lambda ps, odd: gradrein.clip_grad_norm_(turned(ps, odd), 0.1, placement={"*": None}),
    "max_norm": lambda ps, odd: gradrein.clip_grad_norm_(ps, 0.2 if odd else 0.1),
    "max_norm in a tensor": lambda ps, odd: gradrein.clip_grad_norm_(ps, torch.tensor(0.2 if odd else 0.1)),
    "error_if_nonfinite": lambda ps, odd: gradrein.clip_grad_norm_(ps, 0.1, error_if_nonfinite=odd),
    "total_norm": lambda ps, odd: gradrein.clip_grads_with_norm_(ps, 0.1, 6.0 if odd else 5.0),
    "norm_type": lambda ps, odd: gradrein.clip_grad_norm_(ps, 0.1, 1.0 if odd else 2.0),
    "limit": lambda ps, odd: gradrein.clip_(ps, gradrein.by_norm(0.2 if odd else 0.1)),
    "policy": lambda ps, odd: gradrein.clip_(ps, gradrein.by_rms(0.1) if odd else gradrein.by_norm(0.1)),
    "adaptive policy": lambda ps, odd: gradrein.clip_(ps, gradrein.policies.ByMedian(k=3.0 if odd else 2.0, warmup=0)),
    "inner policy": lambda ps, odd: gradrein.clip_(
        ps, gradrein.policies.SkipSpikes(gradrein.by_norm(0.2 if odd else 0.1))
    ),
    "patterns": lambda ps, odd: gradrein.clip_(
        ps, {"p0" if odd else "p1": gradrein.by_norm(0.1), "*": gradrein.by_norm(0.1)}
    ),
    "nonfinite": lambda ps, odd: gradrein.clip_(ps, gradrein.by_norm(0.1), nonfinite="skip" if odd else "zero"),
    "function": lambda ps, odd: (
        gradrein.clip_(ps, gradrein.by_norm(0.1)) if odd else gradrein.clip_grad_norm_(list(ps.values()), 0.1)
    ),
}


def called_with_something_else(case, call, at):
    """One rank makes another call: what every rank raises, and whether its gradients are as they were."""
    parameters, _ = layouts.build(CASES[case])
    before = [layouts.piece(p.grad).clone() for p in parameters.values()]
    found = placements.error(lambda: CALLS[call](parameters, dist.get_rank() == at))
    same = [torch.equal(layouts.piece(p.grad), b) for p, b in zip(parameters.values(), before, strict=True)]
    return (*found, all(same))


def stages_with_another_limit(at):
    rank = dist.get_rank()
    mine = placements.grads((f"layer{rank}", [3.0 + rank, 4.0]))
    limit = gradrein.by_norm(0.2 if rank == at else 0.1)
    found = placements.error(
        lambda: gradrein.clip_(mine, limit, placement=gradrein.distributed.Disjoint(placements.line()))
    )
    return (*found, mine[f"layer{rank}"].grad.tolist() == [3.0 + rank, 4.0])


def someone_elses_policy():
    """What another rank's object holds is not compared: it may be about that rank."""

    class Own:
        p = 2.0

        def __init__(self):
            self.rank = dist.get_rank()

        def decide(self, grads):
            return gradrein.by_norm(0.1).decide(grads)

    parameters, _ = layouts.build(LINE)
    layouts.close(gradrein.clip_(parameters, Own()).norm_after, 0.1, 6)
