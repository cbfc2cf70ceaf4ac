"""Groups, weights, noise, statistics, streams, scalers, precision."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradrein
from functions import function
from gradrein import errors
from gradrein.persample import engine
from gradrein.persample.representations import base

from .oracle import close, flat, loop


def model_and_losses(batch=4, steps=3, width=5):
    model = nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2))
    x = torch.randn(batch, steps, width)
    return model, lambda: model(x).square().sum((1, 2))


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(0, 5),
    steps=st.integers(1, 5),
    d_in=st.integers(1, 5),
    d_out=st.integers(1, 5),
    order=st.permutations(range(3)),
    bias=st.booleans(),
)
def test_linear_of_any_shape_and_layout(batch, steps, d_in, d_out, order, bias):
    layer = nn.Linear(d_in, d_out, bias=bias)
    sizes = (batch, steps, 2)
    x = torch.randn([sizes[i] for i in order] + [d_in])
    out = torch.tanh(layer(x)).movedim(order.index(0), 0)
    losses = out.flatten(1).square().sum(1) if batch else out.sum((1, 2, 3))
    ps = gradrein.per_sample(losses, layer)
    found = ps.grads()
    assert ps.norms().shape == (batch,)
    if batch:
        expected = loop(losses, dict(layer.named_parameters()))
        torch.testing.assert_close(flat(found), flat(expected))
        torch.testing.assert_close(ps.norms(), flat(expected).norm(dim=1))
    else:
        assert found["weight"].shape == (0, d_out, d_in)
        ps.clip_(1.0)
        torch.testing.assert_close(layer.weight.grad, torch.zeros(d_out, d_in))


@settings(max_examples=60, deadline=None)
@given(
    dims=st.integers(1, 3),
    channels=st.tuples(st.sampled_from([1, 3, 8, 9]), st.sampled_from([1, 2, 8, 40])),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    last=st.booleans(),
    chunk=st.sampled_from([1, 1 << 22]),
)
def test_convolution_of_any_shape(dims, channels, kernel, stride, padding, dilation, last, chunk):
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](*channels, kernel, stride, padding, dilation)
    x = torch.randn(3, channels[0], *(7 + i for i in range(dims)))
    if last and dims > 1:
        x = x.contiguous(memory_format=(torch.channels_last, torch.channels_last_3d)[dims - 2])
    losses = layer(x).square().flatten(1).sum(1)
    expected = loop(losses, dict(layer.named_parameters()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "CHUNK_BYTES", chunk)
        ps = gradrein.per_sample(losses, layer)
        torch.testing.assert_close(ps.norms(), flat(expected).norm(dim=1))
        torch.testing.assert_close(ps.grads(), expected)


@pytest.mark.parametrize("groups", [[0, 0, 1, 1], [7, 3, 7, 7], [1, 1, 1, 1], [3, 2, 1, 0]])
def test_groups(groups):
    model, losses = model_and_losses()
    out = losses()
    each = flat(loop(out, dict(model.named_parameters())))
    numbers = torch.tensor(groups)
    expected = torch.stack([each[numbers == n].sum(0) for n in numbers.unique()])
    ps = gradrein.per_sample(out, model, sample_groups=numbers)
    torch.testing.assert_close(flat(ps.grads()), expected)
    torch.testing.assert_close(ps.norms(), expected.norm(dim=1))
    ps.audit()
    with model[0].weight.register_hook(lambda g: g):  # each group in a backward pass of its own
        alone = gradrein.per_sample(out, model, sample_groups=numbers, allow_opaque=True).grads()
    torch.testing.assert_close(flat(alone), expected)


def test_weights_may_be_a_function_of_the_norms():
    model, losses = model_and_losses()
    out = losses()
    each = flat(loop(out, dict(model.named_parameters())))
    weights = each.norm(dim=1) ** -0.5
    gradrein.per_sample(out, model).weighted_(lambda norms: norms**-0.5)
    written = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(written, weights @ each)
    gradrein.per_sample(out, model).weighted_(torch.ones(4))  # adds to what is there, as backward does
    again = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(again, weights @ each + each.sum(0))


def test_clipping_per_parameter_and_automatic():
    model, losses = model_and_losses()
    out = losses()
    expected = loop(out, dict(model.named_parameters()))
    gradrein.per_sample(out, model).clip_(0.3, per_parameter=True)
    for name, p in model.named_parameters():
        factor = (0.3 / expected[name].flatten(1).norm(dim=1)).clamp(max=1)
        torch.testing.assert_close(p.grad, torch.einsum("b,b...->...", factor, expected[name]) / 4)
    model.zero_grad()
    gradrein.per_sample(out, model).clip_(0.3, gamma=0.01, divide_by=1)
    factor = 0.3 / (flat(expected).norm(dim=1) + 0.01)
    written = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(written, factor @ flat(expected))


def test_stats_against_their_definitions():
    model, losses = model_and_losses(batch=6)
    out = losses()
    each = flat(loop(out, dict(model.named_parameters())))
    stats = gradrein.per_sample(out, model).stats()
    mean = each.mean(0)
    covariance = (each - mean).square().sum() / 5
    assert stats.trace_of_covariance == pytest.approx(float(covariance))
    assert stats.norm_of_mean == pytest.approx(float(mean.norm()))
    assert stats.squared_signal == pytest.approx(float(mean.square().sum() - covariance / 6))
    assert stats.alignment == pytest.approx(float(F.cosine_similarity(each, mean[None]).mean()))
    with pytest.raises(errors.ArgumentError, match="at least two samples are needed, found 1"):
        gradrein.per_sample(out[:1], model).stats()


def test_a_stream_is_the_gradients_in_parts():
    model, losses = model_and_losses()
    ps = gradrein.per_sample(losses(), model)
    parts = {}
    for name, part, block in ps.stream(samples=3):
        assert len(block) == part.stop - part.start <= 3
        parts.setdefault(name, []).append(block)
    for name, block in ps.grads().items():
        torch.testing.assert_close(torch.cat(parts[name]), block)


def test_a_scaler_is_undone_in_answers_and_kept_in_gradients():
    model, losses = model_and_losses()
    out = losses()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    expected = gradrein.per_sample(out, model)
    scaled = gradrein.per_sample(scaler.scale(out), model, scaler=scaler)
    torch.testing.assert_close(scaled.norms(), expected.norms())
    torch.testing.assert_close(scaled.gram(), expected.gram())
    torch.testing.assert_close(scaled.dot(), expected.dot())
    expected.clip_(0.5)
    wanted = [p.grad.clone() * 1024 for p in model.parameters()]
    model.zero_grad()
    scaled.clip_(0.5)
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted)


def test_the_audit_finds_a_wrong_rule():
    twice = function("Twice", torch.mul, lambda g, x, _: (None, (g * x).sum(0)))

    w = torch.ones(3, requires_grad=True)
    losses = twice.apply(torch.randn(4, 3), w).sum(1)
    gradrein.register_rule(twice, lambda use: use.layout.sums(use.gradient, use.shape), replace=True)
    with pytest.raises(errors.AuditError, match="the weighted sum for `w` is off"):
        gradrein.per_sample(losses, {"w": w}).audit()
    gradrein.register_rule(
        twice, lambda use: use.layout.sums(use.gradient * use.node.saved_tensors[0], use.shape), replace=True
    )
    assert gradrein.per_sample(losses, {"w": w}).audit().parameters["w"] < 1e-12
    with pytest.raises(errors.ArgumentError, match="there is a rule for `.*Twice` already"):
        gradrein.register_rule(twice, lambda use: use.gradient)
    gradrein.register_rule(twice, lambda use: use.gradient[0], replace=True)
    with pytest.raises(errors.ArgumentError, match=r"returned shape \(3,\), expected \(4, 3\)"):
        gradrein.per_sample(losses, {"w": w})


def test_the_plan_names_every_parameter():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    plan = gradrein.per_sample(model["a"](torch.randn(3, 2)).sum(1), model).plan()
    assert plan.splitlines()[1:] == [
        "a.weight  gram",
        "a.bias    stored",
        "b.weight  unused: no loss depends on it",
        "b.bias    unused: no loss depends on it",
    ]


def test_weights_that_are_no_numbers_and_a_threshold_that_limits_nothing():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    losses = model(x).square().sum(1)
    ps = gradrein.per_sample(losses, model)
    for weights in ([1.0] * 4, 2.0, lambda norms: 1.0):
        with pytest.raises(gradrein.errors.ArgumentError, match="weighted_: expected a tensor"):
            ps.weighted_(weights)
    assert model.weight.grad is None
    ps.weighted_(torch.tensor([True, False, True, True]))
    expected = loop(losses, {"weight": model.weight})["weight"]
    torch.testing.assert_close(model.weight.grad, expected[[0, 2, 3]].sum(0))
    model.zero_grad()
    ps.clip_(float("inf"))
    torch.testing.assert_close(model.weight.grad, expected.mean(0))


@pytest.mark.parametrize("per_parameter", [False, True])
def test_norms_that_are_handed_out_may_be_changed(per_parameter):
    """A bound for private training rests on those that were not."""
    model = torch.nn.Linear(3, 2).double()
    ps = gradrein.per_sample(model(5 * torch.randn(4, 3, dtype=torch.float64)).sum(1), model, retain_graph=True)
    expected = {name: g.flatten(1).norm(dim=1) for name, g in ps.grads().items()}
    ps.norms().zero_()
    for length in ps.norms(per_parameter=True).values():
        length.zero_()
    ps.clip_(1.0, per_parameter=per_parameter).zero_()
    torch.testing.assert_close(ps.norms(per_parameter=True), expected)
    torch.testing.assert_close(ps.norms(), torch.stack(list(expected.values())).norm(dim=0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("retain_graph", [True, False])
def test_uses_of_what_a_table_is_made_into_are_pulled_down_together(dtype, retain_graph, monkeypatch):
    """As layers that each mask one bias of positions; the table is also used as it is."""
    pulls, pull = [], engine.pull
    monkeypatch.setattr(engine, "pull", lambda *args: pulls.append(args) or pull(*args))
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(5, 2, dtype=dtype))
    x, where = torch.randn(4, 2, 3, 3, dtype=dtype), torch.arange(9).view(3, 3) % 5
    bias = F.embedding(where, table).permute(2, 0, 1)[None]
    for keep in (torch.ones(3, 3), torch.ones(3, 3).tril(), torch.eye(3)):
        x = torch.sin(x + torch.where(keep > 0, bias, -1.0).clone())
    losses = x.sum((1, 2, 3)) + torch.sin(x[:, :, 0, 0] @ table.T).sum(1)
    expected = loop(losses, {"table": table})["table"]
    ps = gradrein.per_sample(losses, {"table": table}, retain_graph=retain_graph)
    close(ps.grads()["table"], expected, dtype, "table")
    assert len(pulls) == 1
    ps.weighted_(torch.arange(4.0))
    close(table.grad, torch.tensordot(torch.arange(4.0).to(dtype), expected, 1), dtype, "weighted")
