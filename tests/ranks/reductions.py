"""What the ranks run: values of which they hold parts, reduced and compared."""

import math

import placements
import torch
import torch.distributed as dist

from gradrein.distributed import Agreement, Layout, Reduction, groups_of
from gradrein.errors import RankError


def _reduction(call="a call", rescaled=False):
    over, inside = groups_of(placements.grid())
    return Reduction([over, inside], Agreement("values", {"the call": call}), rescaled=rescaled), over, inside


def over_layouts():
    """An entry over both groups, over one of them, as copies, and here alone."""
    reduction, over, inside = _reduction()
    rank = dist.get_rank()
    layouts = [
        Layout((over, inside), (0, 1)),
        Layout((inside,), (0,)),
        Layout((inside,), (0,), (over,)),
        Layout(copies=(over, inside)),
        Layout(),
    ]
    values = torch.tensor([rank, rank, 1.0, 5.0, 7.0 + rank], dtype=torch.float64)
    pair = 2 * (rank // 2)
    assert reduction.sum(values, layouts).tolist() == [6.0, 2 * pair + 1, 2.0, 5.0, 7.0 + rank]
    assert reduction.max(values, layouts).tolist() == [3.0, pair + 1, 1.0, 5.0, 7.0 + rank]
    assert reduction.sum(torch.ones(3, dtype=torch.float64)).tolist() == [4.0] * 3
    values[0] = math.nan if rank == 2 else -math.inf
    assert math.isnan(reduction.max(values, layouts)[0])


def norms(sizes, p, rescaled):
    """Norms of parts come to that of the whole, however large or small; one more entry than a message holds."""
    reduction, over, inside = _reduction(rescaled=rescaled)
    parts = [torch.tensor([size * (r + 1) for size in sizes], dtype=torch.float64) for r in range(4)]
    layouts = [Layout((over, inside), (0, 0))] * len(sizes)
    found = reduction.norms(parts[dist.get_rank()], [p] * len(sizes), layouts)
    whole = torch.linalg.vector_norm(torch.arange(1.0, 5.0, dtype=torch.float64), p)
    expected = torch.tensor(sizes, dtype=torch.float64) * whole
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)


def another_call(at):
    """All ranks hear of one that makes another call, also those that share no group with it."""
    reduction, *_ = _reduction("another" if dist.get_rank() == at else "a call")
    return _error(lambda: reduction.sum(torch.ones(1, dtype=torch.float64)))


def other_sizes(at):
    """The first message has one size, so that ranks with more to send are found out, too."""
    count = 3000 if dist.get_rank() == at else 2
    over, inside = groups_of(placements.grid())
    agreement = Agreement("values", {"the call": "a call", "the number of values": count})
    return _error(lambda: Reduction([over, inside], agreement).sum(torch.ones(count, dtype=torch.float64)))


def other_copies(at):
    """Copies with different marks are refused on all ranks, copies that some do not hold are not."""
    reduction, over, inside = _reduction()
    layout = Layout((inside,), (0,), (over,))
    marks = torch.tensor([0.0 if dist.get_rank() == 0 else 3.0], dtype=torch.float64)
    reduction.require_same(marks, [layout], "copies differ")
    marks = torch.tensor([2.0 if dist.get_rank() == at else 3.0], dtype=torch.float64)
    return _error(lambda: reduction.require_same(marks, [layout], "copies differ"))


def _error(run):
    try:
        run()
    except RankError as error:
        return str(error)
    return "nothing"
