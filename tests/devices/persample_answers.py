"""What is compared of per-sample gradients, and what of it the simulation cannot show."""

import pytest
from simulated import KIND

import gradrein

NOT_SIMULATED = {
    "embedding_sparse": "sparse gradients",
    "tied_sparse_embedding_and_head": "sparse gradients",
    "adjacency_sparse": "sparse tensors",
    "ranking_beside_a_task": "a kernel that torch looks up by device",
    "mixup_under_autocast": "the autocast of the CPU",
    "kept_gradient": "a kernel in Python, which the search for hooks takes for one",
}
if KIND == "sim":
    NOT_SIMULATED |= {"checkpointed": "a pass inside a pass, by kernels in Python"}


def simulated(names):
    """Return the names to test, some of them marked."""
    marks = {name: pytest.mark.skip(reason=f"not simulated: {why}") for name, why in NOT_SIMULATED.items()}
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


def answers(model, losses, **options):
    ps = gradrein.per_sample(losses, model, **options)
    grads, norms, gram = ps.grads(), ps.norms(), ps.gram()
    ps.clip_(1.0)
    return grads, norms, gram, [p.grad for p in model.parameters() if p.grad is not None]
