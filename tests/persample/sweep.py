"""Every module with parameters that torch ships sample inputs for: right, or refused by one of our errors.

What is refused is asked again with that allowed, and must then be right as well.

    PYTHONPATH=src python -m tests.persample.sweep      # writes docs/layers.md
"""

import warnings
from pathlib import Path

import torch
from torch.testing._internal import common_modules

import gradrein
from gradrein.errors import GradreinError

from .oracle import loop

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"

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
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=False, training=True)
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
            ps = gradrein.per_sample(losses, model)
        except GradreinError as error:
            kind = type(error).__name__
            ps = gradrein.per_sample(losses, model, allow_coupling=True, allow_opaque=True)
        compare(ps, expected, str(build.kwargs))
        alone = has_no_batch(model, out)
        yield "refused: one sample, no batch" if alone and kind == "BatchCouplingError" else kind


def has_no_batch(model, out):
    """Return whether the module was called on one sample without a batch dimension: its rows all come from that one."""
    if isinstance(model, torch.nn.modules.conv._ConvNd):
        return out.dim() == len(model.kernel_size) + 1
    if isinstance(model, torch.nn.Linear | torch.nn.Bilinear | torch.nn.RNNCellBase):
        return out.dim() == 1
    return out.dim() == 2 and isinstance(model, SEQUENCES)


def slanted(out):
    """One loss per row of the output that is no symmetric function of it."""
    out = out.reshape(len(out), -1)
    slope = torch.linspace(0.5, 1.5, out.shape[1], dtype=out.dtype)
    return (out * slope + 0.1 * out**2).sum(1)


def compare(ps, expected, which):
    found = ps.grads()
    assert list(found) == list(expected)
    for name in expected:
        assert found[name].shape == expected[name].shape, f"{which} {name}"
        assert torch.allclose(found[name], expected[name], rtol=1e-7, atol=1e-7), f"{which} {name}"
    if len(ps):
        norms = torch.cat([g.flatten(1) for g in expected.values()], 1).norm(dim=1)
        torch.testing.assert_close(ps.norms(), norms)


def short_name(info):
    """Return the name of a module as the page has it."""
    return info.name.removeprefix("nn_").replace("nn.", "")


def table(infos=common_modules.module_db):
    """Return for each module with parameters how many of its sample inputs ended how."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in infos:
            kinds = list(outcomes(info))
            if kinds:
                found[short_name(info)] = {k: kinds.count(k) for k in sorted(set(kinds))}
    return dict(sorted(found.items()))


# Ops outside torch's modules: how the gradients of a parameter they use are held, and a case of each.
OPS = (
    ("`torch._grouped_mm`: experts in groups", "rows, by sample and expert", "test_experts"),
    ("a stack's member alone, `w[e]`: experts in a loop", "rows, by sample and expert", "experts_in_a_loop"),
    ("`bmm`, `baddbmm`, `einsum`", "rows, by sample and member", "batched_product_with_samples_in_columns"),
    ("`w[indices]`", "ids and rows, or cells", "index_rows"),
    ("`index_select`", "ids and rows, or cells", "index_select_rows"),
    ("`gather`", "cells", "gathered_cells"),
    ("`index_put`, `x[indices] = w`", "stored", "put_values"),
    ("elementwise ops on a bare parameter (`exp`, `clamp`, ...)", "stored", "exp_of_rows"),
    ("a parameter without dimensions", "stored", "no_dimensions"),
    ("a table resized with antialiasing", "pulled through its op", "resized_table"),
)


def row(name, kinds):
    """Return the line of one module."""
    return f"| {name} | {', '.join(f'{n} {kind}' for kind, n in kinds.items())} |"


def page(found):
    """Return the docs page."""
    lines = [
        "# Layers",
        "",
        "`tests/persample/sweep.py` writes this page. It runs every module with parameters in torch's module",
        "database on the sample inputs that torch ships, in float64, and compares with a loop over samples. *Right* means",
        "that gradients and norms are equal for every parameter. Refused inputs were run again with",
        "`allow_coupling=True, allow_opaque=True`, and were then right.",
        "",
        "| module | sample inputs |",
        "|---|---|",
    ]
    lines += [row(name, kinds) for name, kinds in found.items()]
    lines += [
        "",
        "## Ops",
        "",
        "Ops that use a parameter directly have rules as well. The backward of an op without a rule runs once per sample.",
        "",
        "| op | gradients held as | case in `tests/persample` |",
        "|---|---|---|",
    ]
    lines += [f"| {op} | {held} | `{case}` |" for op, held, case in OPS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    PAGE.write_text(page(table()))
