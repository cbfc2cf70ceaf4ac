"""Every module with parameters that torch ships sample inputs for: right, or refused by one of our errors.

What is refused is asked again with that allowed, and must then be right as well.
"""

import warnings

import pytest
import torch

import bridle
from bridle.errors import BridleError

from .oracle import loop

common_modules = pytest.importorskip("torch.testing._internal.common_modules")

# Refused, with the reason; everything else must be right.
REFUSED = {
    "BatchNorm1d": "BatchCouplingError",
    "BatchNorm2d": "BatchCouplingError",
    "BatchNorm3d": "BatchCouplingError",
    "LinearCrossEntropyLoss": "UnsupportedOperationError",
}
SEQUENCES = (
    torch.nn.RNNBase,
    torch.nn.MultiheadAttention,
    torch.nn.Transformer,
    torch.nn.TransformerEncoder,
    torch.nn.TransformerEncoderLayer,
    torch.nn.TransformerDecoderLayer,
)


def first_tensor(out):
    if isinstance(out, torch.Tensor):
        return out
    if isinstance(out, dict):
        out = list(out.values())
    return first_tensor(out[0])


def outcomes(info):
    """Yield 'right', or the name of the error, for each sample input in training mode."""
    inputs = info.module_inputs_func(
        info, device="cpu", dtype=torch.float64, requires_grad=False, training=True
    )
    for given in inputs:
        torch.manual_seed(0)
        build, call = given.constructor_input, given.forward_input
        if call is None:
            continue
        model = info.module_cls(*build.args, **build.kwargs).double().train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not parameters:
            return
        out = first_tensor(model(*call.args, **call.kwargs))
        if not out.requires_grad or out.dim() == 0:
            continue
        second = any(getattr(module, "batch_first", True) is False for module in model.modules())
        if out.dim() == 3 and second:
            out = out.transpose(0, 1)
        losses = slanted(out)
        expected = loop(losses, parameters)
        kind = "right"
        try:
            ps = bridle.per_sample(losses, model)
        except BridleError as error:
            kind = type(error).__name__
            ps = bridle.per_sample(losses, model, allow_coupling=True, allow_opaque=True)
        compare(ps, expected, str(build.kwargs))
        steps = out.dim() == 2 and isinstance(model, SEQUENCES)
        yield "refused: one sequence, no batch" if steps and kind != "right" else kind


def slanted(out):
    """One loss per row of the output that is no symmetric function of it."""
    out = out.reshape(len(out), -1)
    slope = torch.linspace(0.5, 1.5, out.shape[1], dtype=out.dtype)
    return (out * slope + 0.1 * out**2).sum(1)


def compare(ps, expected, which):
    found = ps.grads()
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], msg=lambda m: f"{which} {name}: {m}")
    if len(ps):
        norms = torch.cat([g.flatten(1) for g in expected.values()], 1).norm(dim=1)
        torch.testing.assert_close(ps.norms(), norms)


def test_right_or_refused(capsys):
    table = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in common_modules.module_db:
            found = list(outcomes(info))
            if found:
                table[info.name.removeprefix("nn_").replace("nn.", "")] = {kind: found.count(kind) for kind in set(found)}
    with capsys.disabled():
        print("\n" + "\n".join(f"{name:32} {kinds}" for name, kinds in sorted(table.items())))
    fine = {"right", "refused: one sequence, no batch"}
    refused = {name: set(kinds) - fine for name, kinds in table.items() if set(kinds) - fine}
    assert refused == {name: {reason} for name, reason in REFUSED.items()}
    assert len(table) > 30
