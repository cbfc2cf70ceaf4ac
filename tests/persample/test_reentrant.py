"""Reentrant checkpoints, against a loop over the samples of the same model with the other kind."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import gradrein
from gradrein import errors

from .cases import B, Calls, D, T, flat_sum, images, tokens
from .oracle import flat, loop

# torch says so at every region inside a region, which it first runs without recording.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")

CASES = {}


def case(build):
    """Register a function that returns a model and its losses, given what to checkpoint with."""
    CASES[build.__name__] = build
    return build


def block():
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.LayerNorm(D))


@case
def one_region():
    model, x = block(), images(T, D).requires_grad_()
    return model, lambda ckpt: flat_sum(ckpt(model, x))


@case
def batch_second():
    model, x = block(), torch.randn(T, B, D).requires_grad_()
    return model, lambda ckpt: flat_sum(ckpt(model, x).transpose(0, 1))


@case
def region_after_region_with_layers_between():
    model = Calls(None, first=nn.Linear(3, D), blocks=nn.ModuleList([block() for _ in range(3)]), last=nn.Linear(D, 2))
    x = images(T, 3)

    def losses(ckpt):
        h = model.first(x)
        for one in model.blocks:
            h = h + ckpt(one, h)  # also around the region
        return flat_sum(model.last(h))

    return model, losses


@case
def dropout_inside():
    model = nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.Linear(D, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
    x = images(T, D)
    return model, lambda ckpt: flat_sum(F.dropout(ckpt(model[1], F.dropout(model[0](x), 0.3)), 0.3))


@case
def weight_shared_with_the_outside():
    layer, x = nn.Linear(D, D), images(T, D)
    return layer, lambda ckpt: flat_sum(layer(torch.tanh(ckpt(lambda h: layer(torch.tanh(layer(h))), layer(x)))))


@case
def region_inside_a_region():
    model, x = nn.ModuleList([nn.Linear(D, D) for _ in range(4)]), images(T, D)

    def inner(h, depth):
        h = torch.tanh(model[depth](h))
        return h if depth == 3 else h + ckpt_of[0](inner, h, depth + 1)

    ckpt_of = [None]

    def losses(ckpt):
        ckpt_of[0] = ckpt
        return flat_sum(ckpt(inner, model[0](x), 1))

    return model, losses


@case
def two_regions_inside_a_region():
    model, x = nn.ModuleList([block() for _ in range(4)]), images(T, D)

    def losses(ckpt):
        def inner(h):
            return ckpt(model[3], model[2](ckpt(model[1], h))) + ckpt(model[1], h)

        return flat_sum(ckpt(inner, model[0](x)) + ckpt(inner, model[0](2 * x)))

    return model, losses


@case
def the_other_kind_inside():
    model, x = nn.ModuleList([block() for _ in range(3)]), images(T, D)

    def losses(ckpt):
        return flat_sum(ckpt(lambda h: model[2](checkpoint(model[1], h, use_reentrant=False)), model[0](x)))

    return model, losses


@case
def several_arguments_and_outputs():
    model = nn.ModuleList([nn.Linear(D, D) for _ in range(4)])
    x, ids = images(T, D), tokens(T, high=D)

    def region(a, scale, b, ids, nothing, frozen):
        assert nothing is None
        picked = model[2](a).gather(2, ids[..., None])
        return model[2](a) * scale, "words", picked + model[3](b + frozen).sum(2, keepdim=True), ids

    def losses(ckpt):
        a, b = model[0](x), model[1](x)
        one, _, two, back = ckpt(region, a, 2.0, b, ids, None, x)
        assert back.dtype == torch.int64
        return flat_sum(one) + flat_sum(two.square()) + flat_sum(a)

    return model, losses


@case
def an_output_unused_and_one_handed_through():
    model, x = nn.ModuleList([nn.Linear(D, D) for _ in range(2)]), images(T, D)

    def losses(ckpt):
        unused, through, out = ckpt(lambda h: (model[1](h).exp(), h, model[1](h)), model[0](x))
        return flat_sum(out * through)

    return model, losses


@case
def one_input_twice():
    model, x = nn.ModuleList([nn.Linear(D, D) for _ in range(2)]), images(T, D)

    def losses(ckpt):
        h = model[0](x)
        return flat_sum(ckpt(lambda a, b: model[1](a) * b, h, h))

    return model, losses


@case
def an_input_made_from_another():
    model, x = nn.ModuleList([nn.Linear(D, D) for _ in range(2)]), images(T, D)

    def losses(ckpt):
        h = model[0](x)
        return flat_sum(ckpt(lambda a, b: model[1](a) * b, h, ckpt(model[1], h)))

    return model, losses


@case
def a_shared_value_goes_in():
    """A table of positions, made from parameters alone outside and used inside."""
    model = Calls(None, places=nn.Parameter(torch.randn(T, D)), inner=nn.Linear(D, D), first=nn.Linear(D, D))
    x = images(T, D)

    def losses(ckpt):
        return flat_sum(ckpt(lambda h, p: model.inner(torch.tanh(h * p)), model.first(x), model.places.exp()))

    return model, losses


@case
def a_shared_value_comes_out():
    """As the first block of a T5, which makes the bias that all blocks use."""
    model = Calls(None, places=nn.Embedding(T, D), blocks=nn.ModuleList([nn.Linear(D, D) for _ in range(3)]))
    x = images(T, D)

    def first(h):
        bias = torch.sin(model.places(torch.arange(T)))
        return torch.tanh(model.blocks[1](h)) + bias, bias

    def losses(ckpt):
        h, bias = ckpt(first, model.blocks[0](x))
        h, bias = ckpt(lambda h, bias: (model.blocks[2](h) * bias, bias), h, bias)
        return flat_sum(h + bias)

    return model, losses


@case
def a_weight_made_inside():
    model = Calls(None, w=nn.Parameter(torch.randn(D, D)), first=nn.Linear(D, D))
    x = images(T, D)
    return model, lambda ckpt: flat_sum(model.first(x) @ torch.tanh(ckpt(torch.sin, model.w)))


@case
def rows_routed_by_value():
    model, x = nn.ModuleList([nn.Linear(D, D) for _ in range(3)]), images(T, D)

    def region(rows):
        choice = rows.sum(1).mul(3).long().abs() % 2
        out = torch.zeros_like(rows)
        for i in range(2):
            picked = (choice == i).nonzero().squeeze(1)
            out = out.index_add(0, picked, torch.tanh(model[i](rows[picked])))
        return out

    return model, lambda ckpt: flat_sum(ckpt(region, model[2](x).reshape(-1, D)).view(B, T, D))


@case
def cnn():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 5, 3)))
    x = images(3, 6, 6)
    return model, lambda ckpt: flat_sum(ckpt(model[1], model[0](x)))


@case
def recurrent():
    model, x = nn.ModuleList([nn.Linear(D, D), nn.LSTM(D, 4, batch_first=True)]), images(T, D)
    return model, lambda ckpt: flat_sum(ckpt(lambda h: model[1](h)[0], model[0](x)))


@case
def a_tied_head():
    model = Calls(None, table=nn.Embedding(7, D), inner=block())
    ids, target = tokens(T), tokens(T)

    def losses(ckpt):
        hidden = ckpt(model.inner, model.table(ids))
        logits = ckpt(lambda h: F.linear(h, model.table.weight), hidden)
        return F.cross_entropy(logits.transpose(1, 2), target, reduction="none").sum(1)

    return model, losses


@case
def sequential():
    model, x = nn.Sequential(*[block() for _ in range(5)]), images(T, D).requires_grad_()
    return model, lambda ckpt: flat_sum(
        checkpoint_sequential(model, 3, x, use_reentrant=ckpt.keywords["use_reentrant"])
    )


def both(build, seed=3):
    """Return the losses with the reentrant kind, and what a loop over samples says of the other kind."""
    model, losses = build()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    torch.manual_seed(seed)
    expected = loop(losses(partial(checkpoint, use_reentrant=False)), parameters)
    torch.manual_seed(seed)
    return model, losses(partial(checkpoint, use_reentrant=True)), expected


@pytest.mark.parametrize("name", CASES)
def test_equals_the_loop(name):
    model, losses, expected = both(CASES[name])
    state = torch.get_rng_state()
    ps = gradrein.per_sample(losses, model)
    found = ps.grads()
    assert list(found) == list(expected)
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], msg=lambda m, key=key: f"{key}: {m}")
    torch.testing.assert_close(ps.norms(), flat(expected).norm(dim=1))
    ps.audit()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", CASES)
def test_backward_is_as_it_was(name):
    model, losses, expected = both(CASES[name])
    gradrein.per_sample(losses, model).clip_(1.0)
    model.zero_grad()
    losses.sum().backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key].sum(0))


def is_proved(model, losses):
    """Compare new data with the loop, and return whether the owners were proved."""
    _, found, expected = both(lambda: (model, losses))
    ps = gradrein.per_sample(found, model)
    torch.testing.assert_close(flat(ps.grads()), flat(expected))
    return "proved" in ps.plan().splitlines()[0]


def test_owners_are_proved_where_values_cannot_change_them():
    model = nn.ModuleList([nn.Linear(D, D), block(), block()])

    def losses(x, ckpt):
        return flat_sum(ckpt(model[2], ckpt(model[1], model[0](x))))

    proved = [is_proved(model, partial(losses, images(T, D))) for _ in range(3)]
    assert proved[1:] == [True, True]  # hooks that others registered before may put the first in doubt


@pytest.mark.parametrize("place", ["above", "inside", "below"])
def test_rows_moved_by_value_are_asked_every_time(place):
    model = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])

    def losses(x, order, ckpt):
        def moved(h, here):
            return torch.tanh(torch.eye(B)[order] @ torch.tanh(h)) if here == place else h

        h = moved(model[0](x), "below")
        return moved(ckpt(lambda h: model[1](moved(model[1](h), "inside")), h), "above").sum(1)

    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2]):
        assert not is_proved(model, partial(losses, images(D), order))


@pytest.mark.parametrize("count", [0, 1])
def test_few_samples(count):
    model, x = block(), images(T, D)[:count].requires_grad_()
    expected = loop(flat_sum(model(x)), dict(model.named_parameters())) if count else {}
    found = gradrein.per_sample(flat_sum(checkpoint(model, x, use_reentrant=True)), model).grads()
    assert [len(g) for g in found.values()] == [count] * 4
    for key in expected:
        torch.testing.assert_close(found[key], expected[key])


def test_saved_tensors_may_be_elsewhere_and_recording_off():
    with torch.autograd.graph.save_on_cpu():
        model, losses, expected = both(region_after_region_with_layers_between)
    with torch.no_grad():
        found = gradrein.per_sample(losses, model).grads()
    torch.testing.assert_close(flat(found), flat(expected))


def test_groups():
    model, losses, expected = both(one_region)
    ps = gradrein.per_sample(losses, model, sample_groups=torch.tensor([0, 1, 0, 1]))
    for key, g in ps.grads().items():
        torch.testing.assert_close(g, torch.stack([expected[key][0::2].sum(0), expected[key][1::2].sum(0)]))


def test_autocast():
    model, x = nn.Sequential(nn.Linear(D, D), block()).float(), images(T, D).float()

    def losses(ckpt):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return flat_sum(ckpt(model[1], model[0](x)).float())

    _, found, expected = both(lambda: (model, losses))
    ps = gradrein.per_sample(found, model)
    torch.testing.assert_close(flat(ps.grads()), flat(expected), rtol=2e-2, atol=1e-2)
    ps.audit()


def test_inputs_without_gradient_hide_the_region_from_autograd_too():
    model, x = nn.ModuleList([nn.Linear(D, 2), nn.Linear(2, 2)]), images(T, D)
    h = checkpoint(model[0], x, use_reentrant=True)
    ps = gradrein.per_sample(flat_sum(model[1](h)), model)
    assert list(ps.grads()) == ["1.weight", "1.bias"]
    assert ps.audit().unused == ("0.weight", "0.bias")


@pytest.mark.parametrize(
    "build",
    [
        lambda model, x: lambda ckpt: ckpt(lambda x: nn.BatchNorm1d(D)(model(x)), x),
        lambda model, x: lambda ckpt: ckpt(lambda x: model(x) @ model(x).T, x),
        lambda model, x: lambda ckpt: (h := ckpt(model, x)) @ h.T,
    ],
)
def test_coupling_is_found(build):
    model, x = nn.Linear(D, D), images(D).requires_grad_()
    run = build(model, x)
    _, losses, expected = both(lambda: (model, lambda ckpt: flat_sum(torch.tanh(run(ckpt)))))
    with pytest.raises(errors.BatchCouplingError, match="of the batch. Values computed with `weight`"):
        gradrein.per_sample(losses, model)
    found = gradrein.per_sample(losses, model, allow_coupling=True).grads()
    torch.testing.assert_close(flat(found), flat(expected))


def refused(losses, model, text):
    with pytest.raises(errors.UnsupportedOperationError, match=text) as caught:
        gradrein.per_sample(losses, model)
    assert caught.value.op == "CheckpointFunctionBackward"


def test_checkpoints_of_others_are_refused():
    class CheckpointFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, region, x):
            ctx.region = region  # to be run again
            return region(x)

        @staticmethod
        def backward(ctx, g):
            return None, g

    model = nn.Linear(D, D)
    losses = CheckpointFunction.apply(model, model(images(D))).sum(1)
    refused(losses, model, "a checkpoint other than torch's.*use_reentrant=False")


def test_a_function_with_the_name_of_a_checkpoint_and_no_region():
    class CheckpointFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    model = nn.Linear(D, 3)
    losses = flat_sum(CheckpointFunction.apply(model(images(D))))
    expected = loop(losses, dict(model.named_parameters()))
    torch.testing.assert_close(gradrein.per_sample(losses, model).grads(), expected)


def test_a_weight_made_partly_inside_is_refused():
    model = Calls(None, a=nn.Parameter(torch.randn(D, D)), b=nn.Parameter(torch.randn(D, D)))
    weight = model.a + checkpoint(torch.sin, model.b, use_reentrant=True)
    refused(flat_sum(images(D) @ weight), model, "partly made inside a reentrant checkpoint.*use_reentrant=False")


def test_a_tensor_in_a_closure_is_refused():
    model = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])
    h = model[0](images(D))
    out = checkpoint(lambda a: model[1](a) * h, h, use_reentrant=True)
    refused(flat_sum(out), model, "not passed to it, such as one in a closure.*use_reentrant=False")


def test_a_region_that_changes_its_input_is_refused():
    model, x = nn.Linear(D, D), images(D)
    out = checkpoint(lambda a, b: model(a) * b.mul_(2), model(x), images(D), use_reentrant=True)
    refused(flat_sum(out), model, "changes its inputs in place")


def test_a_freed_graph_is_refused():
    model, x = nn.Linear(D, 2), images(D).requires_grad_()
    losses = checkpoint(model, x, use_reentrant=True).sum(1)
    losses.sum().backward()
    with pytest.raises(errors.GraphFreedError, match="Query before that"):
        gradrein.per_sample(losses, model)


def test_the_drop_in():
    model = Calls(lambda m, x: checkpoint(m.inner, torch.tanh(m.first(x)), use_reentrant=True))
    model.first, model.inner = nn.Linear(D, D), block()
    x = images(T, D).requires_grad_()
    expected = loop(flat_sum(model.inner(torch.tanh(model.first(x)))), {**dict(model.named_parameters()), "x": x})
    flat_sum(gradrein.call_for_per_sample_grads(model)(x)).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad_sample, expected[name])
    torch.testing.assert_close(x.grad, expected["x"].sum(0))
