"""What must not fool a proof of ownership: strides, index dtypes, data that samples share."""

import pytest
import torch
from torch import nn

import gradrein
from functions import function
from gradrein.errors import GradreinError
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
