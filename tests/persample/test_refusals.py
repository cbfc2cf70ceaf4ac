"""What is refused, and in which words."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradrein
from functions import function
from gradrein import errors

from .oracle import flat, loop

X = torch.randn(4, 3, dtype=torch.float64)


def parameters(model):
    return dict(model.named_parameters())


def batch_norm_after_linear():
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    return model, model(X).squeeze(1), "computed with `0"


def batch_norm_first():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    return model, model(X).squeeze(1), "`NativeBatchNormBackward0` uses a row of data.* for several samples"


def batch_norm_without_parameters():
    model = nn.Sequential(nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2, affine=False))
    return model, model(X[:, None]).sum((1, 2)).square(), "computed with `0"


def contrastive_loss():
    model = nn.Linear(3, 5)
    h = F.normalize(model(X), dim=1)
    return model, F.cross_entropy(h @ h.T / 0.1, torch.arange(4), reduction="none"), "mixes the samples"


def inputs_that_need_a_gradient():
    model = nn.Linear(3, 5)
    h = model(2 * X.clone().requires_grad_())  # the product saves nothing of the batch
    return model, (h @ h.T).tanh().sum(1), "mixes the samples"


def loss_less_the_mean():
    model = nn.Linear(3, 1)
    losses = model(X).squeeze(1).square()
    return model, (losses - losses.mean()).square(), "the output of `PowBackward0` that `SubBackward0` uses"


@pytest.mark.parametrize(
    "build",
    [
        batch_norm_after_linear,
        batch_norm_first,
        batch_norm_without_parameters,
        contrastive_loss,
        inputs_that_need_a_gradient,
        loss_less_the_mean,
    ],
)
def test_coupled_batches(build):
    model, losses, text = build()
    with pytest.raises(errors.BatchCouplingError, match=text):
        gradrein.per_sample(losses, model)
    ps = gradrein.per_sample(losses, model, allow_coupling=True)
    torch.testing.assert_close(flat(ps.grads()), flat(loop(losses, parameters(model))))


@pytest.mark.parametrize(
    "layer",
    [nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.LSTM(4, 4, batch_first=True)],
    ids=["attention", "lstm"],
)
def test_losses_of_tokens_in_one_row(layer):
    """The way out is a shape, not another normalisation."""
    layer = layer.double().eval()
    x, target = torch.randn(4, 16, 4, dtype=torch.float64), torch.randint(4, (64,))

    def losses():
        out = layer(x)
        out = out[0] if isinstance(out, tuple) else out
        return F.cross_entropy(out.flatten(0, 1), target, reduction="none")

    with pytest.raises(errors.BatchCouplingError, match=r"losses\.reshape\(sequences, tokens\)"):
        gradrein.per_sample(losses(), layer)
    ps = gradrein.per_sample(losses().reshape(4, 16), layer)
    torch.testing.assert_close(ps.grads(), loop(losses().reshape(4, 16).sum(1), parameters(layer)))
    centred = losses() - losses().mean()
    with pytest.raises(errors.BatchCouplingError, match="mixes the samples|depends on several samples"):
        gradrein.per_sample(centred, layer)


Opaque = function("Opaque", torch.matmul, lambda g, x, w: (g @ w.T, x.T @ g))


def test_an_opaque_function_is_refused_by_name_or_taken_slowly():
    w = nn.Parameter(torch.randn(3, 2))
    losses = Opaque.apply(X, w).square().sum(1)
    with pytest.raises(errors.UnsupportedOperationError, match="`w` is used by `OpaqueBackward`") as caught:
        gradrein.per_sample(losses, {"w": w})
    assert (caught.value.op, caught.value.where) == ("OpaqueBackward", "w")
    found = gradrein.per_sample(losses, {"w": w}, allow_opaque=True).grads()
    torch.testing.assert_close(found, loop(losses, {"w": w}))


def test_a_freed_graph():
    model = nn.Linear(3, 2)
    losses = model(X).square().sum(1)
    losses.sum().backward()
    with pytest.raises(
        errors.GraphFreedError, match="(?s)Which pass freed it is not known.*per_sample needs .*query before"
    ):
        gradrein.per_sample(losses, model)


def test_a_value_changed_in_place():
    model = nn.Linear(3, 2)
    x = X.clone()
    losses = model(x).square().sum(1)
    x.zero_()
    with pytest.raises(
        errors.InplaceModifiedError, match="(?s)`mat1` of AddmmBackward0.*version 0, now at 1.*query before"
    ):
        gradrein.per_sample(losses, model)


def test_groups_that_cannot_be_meant():
    model = nn.Linear(3, 2)
    with pytest.raises(errors.ArgumentError, match=r"tensor of shape \(4,\); found torch.float64 of shape \(3,\)"):
        gradrein.per_sample(model(X).sum(1), model, sample_groups=torch.zeros(3))
    with pytest.raises(errors.ArgumentError, match=r"found list. \(To name ranks, use `process_group`.\)"):
        gradrein.per_sample(model(X).sum(1), model, sample_groups=[0, 1])
    with pytest.raises(errors.ArgumentError, match="`process_group` must be a process group or a device mesh"):
        gradrein.per_sample(model(X).sum(1), model, process_group=torch.zeros(3))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("retain_graph", [True, False])
def test_parameters_of_another_model(batch, retain_graph):
    model, other = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    losses = model(X[:batch]).square().sum(1)
    with pytest.raises(
        errors.UnusedInputError, match="depend on none.*`0.weight`, `0.bias`, `1.weight` and 1 more"
    ) as e:
        gradrein.per_sample(losses, other, retain_graph=retain_graph)
    assert e.value.names == ("0.weight", "0.bias", "1.weight", "1.bias")
    with pytest.raises(errors.ArgumentError, match="no parameter requires a gradient"):
        gradrein.per_sample(model(X[:batch]).square().sum(1), other.requires_grad_(False))


def test_clipping_refuses_what_is_not_finite_and_changes_nothing():
    model = nn.Linear(3, 1)
    losses = model(X).squeeze(1) * torch.tensor([1.0, float("inf"), 1.0, 1.0])
    with pytest.raises(errors.NonFiniteGradientError, match=r"1 of 4 samples are NaN or infinite.*sample 1"):
        gradrein.per_sample(losses, model).clip_(1.0)
    assert model.weight.grad is None
    gradrein.per_sample(losses, model).clip_(1e9, nonfinite="drop")
    torch.testing.assert_close(model.weight.grad, X[[0, 2, 3]].sum(0, keepdim=True) / 4)


MEANINGLESS = [
    *({"max_norm": 0.0}, {"max_norm": float("nan")}, {"divide_by": 0}, {"gamma": -1.0}, {"gamma": float("nan")}),
    {"max_norm": float("inf"), "gamma": 0},
]


@pytest.mark.parametrize("arguments", MEANINGLESS)
def test_thresholds_that_mean_nothing(arguments):
    model = nn.Linear(3, 1)
    with pytest.raises(errors.ArgumentError, match="clip_:"):
        gradrein.per_sample(model(X).squeeze(1), model).clip_(**{"max_norm": 1.0, **arguments})


@pytest.mark.parametrize("retain_graph", [True, False])
def test_data_shifted_by_a_row_inside_a_checkpoint(retain_graph):
    model, data = nn.Linear(3, 3), torch.randn(6, 3)

    def losses(other):
        return checkpoint(lambda x, z: (model(x) * z).sum(1), data[:5], other, use_reentrant=False)

    with pytest.raises(errors.BatchCouplingError, match="is used for one sample by .* and for another"):
        gradrein.per_sample(losses(data[1:]), model, retain_graph=retain_graph)
    found = gradrein.per_sample(losses(torch.ones(5, 3)), model, retain_graph=retain_graph).grads()
    torch.testing.assert_close(found, loop(losses(torch.ones(5, 3)), dict(model.named_parameters())))


def test_real_and_complex_views_of_the_same_data():
    data, real = torch.randn(4, 4, 2), nn.Parameter(torch.randn(8, 4))
    weights = {"complex": nn.Parameter(torch.randn(4, 4, dtype=torch.complex128)), "real": real}

    def losses():
        return ((torch.view_as_complex(data) @ weights["complex"]).abs() + data.reshape(4, 8) @ real).square().sum(1)

    torch.testing.assert_close(gradrein.per_sample(losses(), weights).grads(), loop(losses(), weights))


@pytest.mark.parametrize("batch", [2, 3, 4, 6])
def test_a_mask_made_from_a_weight_could_be_data_and_allow_coupling_is_right(batch):
    weight, x = torch.randn(6, 4, requires_grad=True), torch.randn(batch, 4)
    losses = (x @ (weight * (weight > 0)).T).square().sum(1)
    with pytest.raises(
        errors.BatchCouplingError, match="for a mask computed from a weight, allow_coupling=True is correct"
    ):
        gradrein.per_sample(losses, [weight], retain_graph=True).norms()
    expected = torch.stack([torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in losses])
    found = gradrein.per_sample(losses, [weight], allow_coupling=True).grads()["0"]
    torch.testing.assert_close(found, expected)


class OtherCheckpoint(torch.autograd.Function):
    """A checkpoint of another library."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        return run(x)

    @staticmethod
    def backward(ctx, g):
        return None, g


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_reentrant_checkpoints():
    """At any depth of the graph, whoever made them."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double(), X.clone().requires_grad_()
    regions = [lambda run, x: checkpoint(run, x, use_reentrant=True), OtherCheckpoint.apply]
    for region in regions:
        for losses in (region(model, x).square().sum(1), region(lambda h: h * 2, model[1](model[0](x))).tanh().sum(1)):
            for options in ({}, {"allow_opaque": True, "allow_coupling": True}):
                with pytest.raises(
                    errors.UnsupportedOperationError, match="is a reentrant checkpoint.*use_reentrant=False"
                ):
                    gradrein.per_sample(losses, model, **options)
    assert all(p.grad is None for p in model.parameters())


def test_gathered_is_a_word_of_norms_only():
    model = nn.Linear(3, 3).double()
    ps = gradrein.per_sample(model(X).square().sum(1), model)
    torch.testing.assert_close(ps.norms(gathered=True), ps.norms())
    for query in (ps.dot, ps.cosine, ps.gram, ps.stats, ps.audit):
        with pytest.raises(TypeError, match="gathered"):
            query(gathered=True)
    with pytest.raises(errors.ArgumentError, match="norms of whole samples. Pass gathered=True alone"):
        ps.norms(gathered=True, per_parameter=True)


def test_rows_of_data_in_two_samples_by_an_op_without_a_rule():
    w, v = (torch.randn(5, requires_grad=True) for _ in range(2))
    x, zeros = torch.randn(4, 5), torch.zeros(3)
    coupled = torch.addmv(zeros, x[:-1], w) * torch.addmv(zeros, x[1:], v)
    with pytest.raises(errors.BatchCouplingError, match="a row of data"):
        gradrein.per_sample(coupled, {"w": w, "v": v}).norms()
    apart = torch.addmv(zeros, x[:-1], w) * torch.addmv(zeros, x[:-1], v)
    torch.testing.assert_close(gradrein.per_sample(apart, {"w": w}).grads()["w"], loop(apart, {"w": w})["w"])


TWO_OPERANDS = {
    **{name: getattr(torch, name) for name in ("mul", "div", "maximum", "atan2", "fmax", "logaddexp", "xlogy")},
    "pow": torch.pow,
    "exponent": lambda w, x: x**w,
    "addcdiv": lambda w, x: torch.addcdiv(w, w, x),
    "lerp": lambda w, x: torch.lerp(w, w + 1, x),
}


@pytest.mark.parametrize("op", TWO_OPERANDS.values(), ids=TWO_OPERANDS)
def test_a_row_of_data_beside_a_weight_is_used_for_one_sample_only(op):
    w = (torch.rand(6, dtype=torch.float64) + 0.5).requires_grad_()
    x = torch.rand(4, 6, dtype=torch.float64) + 0.5
    losses = op(w, x).square().sum(1)
    torch.testing.assert_close(gradrein.per_sample(losses, {"w": w}).grads()["w"], loop(losses, {"w": w})["w"])
    with pytest.raises(errors.BatchCouplingError, match="depends on several samples"):
        gradrein.per_sample((op(w, x) + op(w, x[0])).square().sum(1), {"w": w}).norms()


def test_data_that_an_unknown_op_keeps():
    w, x = torch.randn(5, requires_grad=True), torch.randn(3)
    losses = torch.addr(torch.zeros(3, 5), x, w).square().sum(1)
    with pytest.raises(
        errors.BatchCouplingError, match="`AddrBackward0` may use a row of data.*not known how.*other ops"
    ):
        gradrein.per_sample(losses, {"w": w}).norms()
    found = gradrein.per_sample(losses, {"w": w}, allow_coupling=True).grads()["w"]
    torch.testing.assert_close(found, loop(losses, {"w": w})["w"])
