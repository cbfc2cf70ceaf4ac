"""What must not fool a proof of ownership: strides, index dtypes, data that samples share."""

import pytest
import torch
from torch import nn

import gradrein
from gradrein.errors import BatchCouplingError, GradreinError
from gradrein.persample.cuts import ALONE, FOLLOWED, PROVED, signature_of
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
    forms = [Losses(strided(lying[how], w), torch.arange(B), B) for how in lying]
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


# Data that samples share ------------------------------------------------------------------------------------------------


def column_for_all(m, x):
    """Multiply rows by a column of the data, with the dimensions mistaken."""
    return (m[0](x)[:, :1] * x[:, 0]).square().sum(1)


def first_row_for_all(m, x):
    return (m[0](x) * x[0]).square().sum(1)


def one_number_for_all(m, x):
    return (m[0](x) * x[1, 2]).square().sum(1)


@pytest.mark.parametrize("function", [column_for_all, first_row_for_all, one_number_for_all])
def test_elements_of_data_that_enter_several_losses(function):
    m, x = model(), data()
    for _ in range(2):
        with pytest.raises(BatchCouplingError, match="is used for one sample by"):
            gradrein.per_sample(function(m, x), m)
        assert check(function(m, x), m, allow_coupling=True)


def causal_mask_twice(m, x):
    mask = torch.ones(B, D).tril()[:1]
    return (m[0](x) * mask).square().sum(1) + (m[0](x).tanh() * mask).sum(1)


def mask_of_each_sample(m, x):
    mask = (torch.rand(B, D) < 0.5).double()
    return ((m[0](x) * mask).sum(1) / (1 + mask.sum(1))).square()


def gates_of_the_row_itself(m, x):
    return (m[0](x) * x * x[:, :1]).square().sum(1)


@pytest.mark.parametrize("function", [causal_mask_twice, mask_of_each_sample, gates_of_the_row_itself])
def test_elements_of_data_that_enter_one_loss_each(function):
    m, x = model(), data()
    for _ in range(2):
        assert check(function(m, x), m) is PROVED


# Convolutions over the batch -------------------------------------------------------------------------------------------


def along_the_batch(conv, x):
    """Return losses of a convolution to which the batch is its length."""
    return conv(x.t()).t().tanh().sum(1)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(nn.Conv1d, {}), (nn.Conv1d, {"groups": 2}), (nn.Conv1d, {"dilation": 2}), (nn.ConvTranspose1d, {})],
)
def test_a_kernel_of_one_mixes_no_samples(kind, options):
    conv = kind(D, 2, 1, **options)
    for _ in range(2):
        assert check(along_the_batch(conv, data()), conv) is PROVED


def test_one_number_for_the_strides_of_all_dimensions():
    weight = nn.Parameter(torch.randn(3, D, 1, 2, 2))
    out = torch.conv3d(torch.randn(D, B, 4, 5)[None], weight, None, [1], [0], [1])[0]
    assert check(out.movedim(1, 0).square().flatten(1).sum(1), {"weight": weight}) is PROVED


@pytest.mark.parametrize(("kind", "options"), [(nn.Conv1d, {}), (nn.Conv1d, {"groups": 2}), (nn.ConvTranspose1d, {})])
def test_a_larger_kernel_over_the_batch_is_refused(kind, options):
    conv = kind(D, 2, 3, padding=1, **options)
    for _ in range(2):
        with pytest.raises(BatchCouplingError):
            gradrein.per_sample(along_the_batch(conv, data()), conv)


# Names -----------------------------------------------------------------------------------------------------------------


class Mul(torch.autograd.Function):
    """A Function of the user's with the name of one of torch's ops, above all parameters."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * y, None


def test_a_function_with_the_name_of_an_op():
    m = model()
    for _ in range(2):
        assert check(Mul.apply(plain(m), torch.rand(B)), m) is ALONE
