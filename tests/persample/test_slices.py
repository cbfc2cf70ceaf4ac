"""Slices that an index moves: reading the index tells what running the op tells."""

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gradrein.persample.layout import MIXED, UNREACHED, Owners
from gradrein.persample.ops.indexing import by_running, by_slices
from gradrein.persample.ops.table import Step

OPS = {
    "index": lambda x, _, dim, index: x[(slice(None),) * dim + (index,)],
    "index, negative": lambda x, _, dim, index: x[(slice(None),) * dim + (index - x.shape[dim],)],
    "index, int32": lambda x, _, dim, index: x[(slice(None),) * dim + (index.int(),)],
    "index_select": lambda x, _, dim, index: x.index_select(dim - x.dim(), index),
    "index_add": lambda x, source, dim, index: x.index_add(dim - x.dim(), index, source, alpha=3),
    "index, a matrix": lambda x, _, dim, index: x[(slice(None),) * dim + (index.view(1, -1),)],
    "index, a mask": lambda x, _, dim, index: x[
        (slice(None),) * dim + (torch.arange(x.shape[dim]) % 2 == len(index) % 2,)
    ],
    "index, twice": lambda x, _, dim, index: x.unsqueeze(0)[index * 0, index % x.shape[0]],
    "index_copy": lambda x, source, dim, index: x.index_copy(dim, index, source),
}
READ = [name for name in OPS if name != "index_copy"]


def owners_of(shape, folded, data):
    """Draw owners for a tensor, the same along some dimensions."""
    sizes = [1 if fold else size for fold, size in zip(folded, shape, strict=False)]
    sizes += list(shape[len(sizes) :])
    count = max(1, int(torch.tensor(sizes).prod()))
    ids = data.draw(st.lists(st.sampled_from([UNREACHED, MIXED, 0, 1, 2, 5]), min_size=count, max_size=count))
    return Owners.of(torch.tensor(ids, dtype=torch.int32)[: int(torch.tensor(sizes).prod())].view(sizes), shape)


@given(
    name=st.sampled_from(list(OPS)),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    folded=st.lists(st.booleans(), min_size=3, max_size=3),
    data=st.data(),
)
def test_reading_the_index_tells_what_running_the_op_tells(name, shape, folded, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    index = torch.tensor(data.draw(st.lists(st.integers(0, shape[dim] - 1), max_size=5)), dtype=torch.int64)
    if name == "index_copy":
        index = torch.unique(index)  # torch does not say which of several copies stays
    x = torch.randn(shape, requires_grad=True)
    source = torch.randn([len(index) if d == dim else n for d, n in enumerate(shape)], requires_grad=True)
    out = OPS[name](x, source, dim, index)
    assume(out.numel())  # running the op on nothing tells nothing
    node, owners = out.grad_fn, owners_of(tuple(out.shape), folded, data)
    for position, input_ in enumerate((x, source)[: len(node.next_functions)]):
        shape = (1, *input_.shape) if name == "index, twice" else tuple(input_.shape)
        step = Step(node, (owners,), position, shape, by_indices=True)
        found, expected = by_slices(step) if name in READ else step.sends(), by_running(step)
        assert found.shape == expected.shape == shape
        assert torch.equal(found.ids.expand(found.shape), expected.ids.expand(expected.shape))
