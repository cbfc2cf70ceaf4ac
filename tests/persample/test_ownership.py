"""What must not fool a proof of ownership: strides, index dtypes, hooks of every kind, data that samples share."""

import threading

import pytest
import torch
from torch import nn

import gradrein
from gradrein._torch.nodes import current_sequence_nr
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


def test_strides_of_a_leaf():
    values = torch.randn(B, B)
    for w in (values, values.T.contiguous().T, values):
        w = w.detach().requires_grad_()
        assert check(w.as_strided((B, B), (B, 1)).tanh().square().sum(1), {"w": w}, allow_coupling=True)


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


def test_more_samples_than_a_dtype_can_count():
    m = nn.Linear(2, 1).to(torch.bfloat16)
    x, order = torch.randn(600, 2, dtype=torch.bfloat16), torch.randperm(600)
    losses = m(x)[order, 0]
    expected = torch.autograd.grad(losses[577], m.weight, retain_graph=True)[0]
    assert torch.equal(gradrein.per_sample(losses, m).grads()["weight"][577], expected)


# Hooks ------------------------------------------------------------------------------------------------------------------


def swap(g):
    return g.flip(0) * 2


def on_tensor(h):
    h.register_hook(swap)


def on_node_before(h):
    h.grad_fn.register_prehook(lambda gs: (swap(gs[0]),))


def on_node_after(h):
    h.grad_fn.register_hook(lambda found, _: (swap(found[0]),))


def in_a_thread(h):
    thread = threading.Thread(target=on_tensor, args=(h,))
    thread.start()
    thread.join()


def on_all_of_it(h):
    torch.autograd.graph.register_multi_grad_hook((h,), lambda _: None)


def removed_again(h):
    h.register_hook(swap).remove()


HOOKS = [on_tensor, on_node_before, on_node_after, in_a_thread, on_all_of_it, removed_again, torch.Tensor.retain_grad]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("calls", [0, 1, 20])  # 20 are more than are remembered
@pytest.mark.parametrize("first", [True, False])
def test_hooks_are_seen(hook, calls, first):
    """Right or refused, whether other graphs are asked before or after the hook is registered."""
    m = model()
    check(plain(m), m)
    h = m[1](m[0](data()))
    losses = losses_above(m, h)
    if first:
        hook(h)
    for _ in range(calls):
        gradrein.per_sample(plain(m), m)
    if not first:
        gradrein.per_sample(losses, m)
        hook(h)
    check(losses, m)
    assert check(plain(m), m)


def test_hooks_on_views_are_seen():
    m = model()
    check(plain(m), m)
    flat_view = m[1](m[0](data())).view(-1)
    flat_view.register_hook(lambda g: swap(g.view(B, D)).view(-1))
    check(losses_above(m, flat_view.view(B, D)), m)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_hooks_of_modules_are_seen_every_time(register):
    m = model()
    hook = {"register_full_backward_hook": lambda _, found, __: (swap(found[0]),)}
    getattr(m[1], register)(hook.get(register, lambda _, given: (swap(given[0]),)))
    for _ in range(3):
        check(plain(m), m)


def test_a_hook_on_a_shared_value_made_long_ago():
    m = model()
    weight = m[0].weight * 2
    weight.register_hook(swap)
    for _ in range(20):
        gradrein.per_sample(plain(m), m)
    check(losses_above(m, torch.tanh(data() @ weight)), m)


def test_a_graph_of_another_thread():
    """Nodes are numbered by thread: a thread that has asked before must not take those of others for younger ones."""
    m, found = model(), []

    def ask():
        for _ in range(2):
            check(plain(m), m)
        found.append(check(losses, m))

    for _ in range(200):  # this thread is ahead of the other
        torch.ones(1, requires_grad=True).exp()
    h = m[1](m[0](data()))
    h.register_hook(swap)
    losses = losses_above(m, h)
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found != [PROVED]


def test_a_graph_that_another_thread_hooked_before_this_one_asked():
    """Its numbers lie after a moment of this thread, although the hook is older than that."""
    m, made = model(), []
    check(plain(m), m)

    def build():
        while current_sequence_nr() < start + 100:
            torch.ones(1, requires_grad=True).exp()
        h = m[1](m[0](data()))
        h.register_hook(swap)
        made.append(losses_above(m, h))

    start = current_sequence_nr()
    thread = threading.Thread(target=build)
    thread.start()
    thread.join()
    check(plain(m), m)
    while current_sequence_nr() < start + 200:
        torch.ones(1, requires_grad=True).exp()
    assert check(made[0], m) != PROVED


def double_after(weight):
    weight.grad_fn.register_hook(lambda given, _: (2 * given[0],))


def double_before(weight):
    weight.grad_fn.register_prehook(lambda given: (2 * given[0],))


def double_if_negative(weight):
    weight.register_hook(lambda g: 2 * g if bool((g < 0).any()) else None)


@pytest.mark.parametrize("hook", [double_after, double_before, double_if_negative])
def test_a_hook_on_a_transposed_weight(hook):
    m = nn.Linear(3, 3, bias=False)
    weight = m.weight.t()
    hook(weight)
    check((torch.randn(4, 3) @ weight).square().sum(1), m)


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


def test_a_kernel_of_one_along_the_batch_alone():
    conv = nn.Conv2d(D, 3, (1, 3), padding=(0, 1))
    x = torch.randn(B, D, 5)
    assert check(conv(x.permute(1, 0, 2)[None])[0].permute(1, 0, 2).square().flatten(1).sum(1), conv) is PROVED


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
