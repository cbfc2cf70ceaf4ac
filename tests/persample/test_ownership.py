"""What must not fool a proof of ownership: strides, index dtypes, data that samples share."""

import pytest
import torch
from torch import nn

import gradrein
from functions import function
from gradrein.errors import GradreinError
from gradrein.persample import cuts
from gradrein.persample.cuts import ALONE, FOLLOWED, signature_of
from gradrein.persample.engine import Losses

from .oracle import flat, loop

B, D = 4, 4


def data():
    return torch.randn(B, D)


def model():
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3))


def losses_above(m, h):
    return m[2](h).square().sum(1)


def plain(m, x=None):
    return losses_above(m, m[1](m[0](data() if x is None else x)))


def check(losses, parameters, **options):
    """Compare with the loop; return how owners were found, or None where it was refused."""
    parameters = dict(parameters.named_parameters()) if isinstance(parameters, nn.Module) else parameters
    expected = loop(losses, parameters)
    try:
        ps = gradrein.per_sample(losses, parameters, **options)
    except GradreinError:
        return None
    torch.testing.assert_close(flat(ps.grads()), flat(expected))
    return ps._source


# Graphs of one signature ------------------------------------------------------------------------------------------------


def strided(x, w):
    """Return losses of places in memory, which are rows or columns of `x * w`: the product lies as `x` does."""
    return (x * w).as_strided((B, B), (B, 1)).square().sum(1)


@pytest.mark.parametrize("first", ["rows", "columns"])
def test_strides_count_places_in_memory(first):
    w, x = nn.Parameter(torch.randn(B, B)), torch.randn(B, B)
    lying = {"rows": x, "columns": x.T.contiguous().T}
    forms = [Losses(strided(lying[how], w), range(B), B) for how in lying]
    assert signature_of(forms[0]) == signature_of(forms[1])
    for how in (first, *lying, first):
        assert check(strided(lying[how], w), {"w": w}, allow_coupling=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("move", [lambda h, o: h[o], lambda h, o: h.index_select(0, o), lambda h, o: h.take(o)])
def test_indices_are_followed_in_every_dtype(dtype, move):
    m = model().to(dtype)
    for order in (torch.arange(B), torch.arange(B).flip(0)):
        out = plain(m, data().to(dtype))
        assert gradrein.per_sample(move(out, order), m)._source is FOLLOWED
        rows = gradrein.per_sample(out, m).grads()
        found = gradrein.per_sample(move(out, order), m).grads()
        assert all(torch.equal(found[name], rows[name][order]) for name in rows)


def written(h, part):
    out = torch.zeros(B, D + 2, dtype=h.dtype)
    out[part] = h[: len(range(B)[part[0]])]
    return out


PARTS = [(slice(None), slice(1, D + 1)), (slice(1, None), slice(2, None)), (slice(None, None, 2), slice(0, D))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_writes_into_slices_are_followed(dtype, part):
    m = nn.Linear(D, D).to(dtype)
    for order in (torch.arange(B), torch.arange(B).flip(0)):
        assert check(written(m(data().to(dtype)[order]), part).square().sum(1), m) is FOLLOWED


def test_more_samples_than_a_dtype_can_count():
    m = nn.Linear(2, 1).to(torch.bfloat16)
    x, order = torch.randn(600, 2, dtype=torch.bfloat16), torch.randperm(600)
    losses = m(x)[order, 0]
    expected = torch.autograd.grad(losses[577], m.weight, retain_graph=True)[0]
    assert torch.equal(gradrein.per_sample(losses, m).grads()["weight"][577], expected)


# Names -----------------------------------------------------------------------------------------------------------------


# A Function of the user's with the name of one of torch's ops, above all parameters.
Mul = function("Mul", torch.mul, lambda g, _, y: (g * y, None))


def test_a_function_with_the_name_of_an_op():
    m = model()
    for _ in range(2):
        assert check(Mul.apply(plain(m), torch.rand(B)), m) is ALONE


@pytest.mark.parametrize("samples", [1, 8, 5000])  # of 5,000 the squares of their numbers are not exact in float32
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_places_of_any_number_of_samples_are_followed(samples, dtype):
    w = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    x, order = torch.randn(samples, 3, dtype=dtype), torch.randperm(samples)
    found = gradrein.per_sample(torch.take(x @ w, order), {"w": w})
    torch.testing.assert_close(found.norms(), x[order].double().norm(dim=1), check_dtype=False, rtol=1e-2, atol=1e-3)
    if samples > 1:
        order[0] = order[-1]  # one row in the losses of two samples
        with pytest.raises(gradrein.errors.BatchCouplingError):
            gradrein.per_sample(torch.take(x @ w, order), {"w": w})


# What was followed is kept while nothing has moved -----------------------------------------------------------------------


def lying(h, k):
    """The same rows, one after the other or side by side in memory, which is read as if they were the former."""
    return ((torch.ones(D, B).T if k else torch.ones(B, D)) * h).as_strided((B, D), (D, 1))


def windows(h, k):
    return ((torch.ones(D, B).T if k else torch.ones(B, D)) * h).as_strided((B, 2, 2), (D, 1, 1)).flatten(1)


def tail(h, k):
    """Nothing of the first rows and columns."""
    return ((torch.ones(D, B).T if k else torch.ones(B, D)) * h).as_strided((B, D - 2), (D, 1), 2)


def put_by_rows(h, k):
    out = torch.zeros(B + 1, D)
    out[k : k + B] = h
    return out[:B]


def put_by_columns(h, k):
    out = torch.zeros(B, B)
    part = out.transpose(0, 1) if k else out.view(B, B)
    part[1:, 1:] = h[1:, 1:]
    return out


def put_by_index(h, k):
    out = torch.zeros(2, B, D)
    out[1][torch.arange(B).roll(k)] = h
    return out[1]


ORDER = torch.arange(B)


def picked_by_one_tensor(h, k):
    return h[ORDER.copy_(torch.arange(B).roll(k))]


MOVES = [lying, windows, tail, put_by_rows, put_by_columns, put_by_index, picked_by_one_tensor]


@pytest.mark.parametrize("move", MOVES)
def test_what_was_followed_is_kept_while_nothing_moves(move, monkeypatch):
    followed, prove = [], cuts.prove
    monkeypatch.setattr(cuts, "prove", lambda *args, **options: followed.append(options) or prove(*args, **options))
    m, times = nn.Linear(D, D), []
    for k in (0, 0, 1, 1, 0, 1):
        followed.clear()
        check(move(m(data()), k).square().sum(1), m, allow_coupling=True)
        times.append(sum(1 for options in followed if options.get("by_indices")))
    assert times == [1, 0, 1, 0, 1, 1]


def test_a_row_that_is_added_in_place_to_all_samples():
    """As positions are in RoCBert: the op hands out one gradient for each sample, and the engine adds them up."""
    m = nn.ModuleDict({"words": nn.Linear(D, D), "positions": nn.Embedding(B, D)})
    for _ in range(3):
        h = m["words"](torch.randn(B, B, D))
        h += m["positions"](torch.arange(B))
        assert check(h.view(B, B, D).square().sum((1, 2)), m)
        h = m["words"](torch.randn(B, B, D)).flatten(0, 1).view(B, B, D)
        h += m["positions"](torch.arange(B))[None]
        assert check(h.square().sum((1, 2)), m)
