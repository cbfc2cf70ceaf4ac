"""Tensors that the kernels take and others, in one call."""

import pytest
import torch

from gradrein import _kernels, _measure
from gradrein.clip import _apply


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    "factor", [0.5, torch.tensor(0.5), torch.tensor([0.5, 0.25, 1.0]), torch.tensor([0.5, 0.25, 1.0]).double()], ids=str
)
def test_every_kind_of_factor(native, factor, monkeypatch):
    if not native:
        monkeypatch.setitem(_kernels.BACKENDS, "cpu", None)
    grads = [torch.randn(4, 4).t()[::2], torch.randn(5), torch.randn(3, dtype=torch.complex64)]
    each = torch.as_tensor(factor).double().expand(3).tolist()
    expected = [g * by for g, by in zip(grads, each, strict=True)]
    _apply.scale_(grads, factor)
    torch.testing.assert_close(grads, expected)
    norms = _measure.norms(grads, 2.0)
    torch.testing.assert_close(norms, torch.stack([g.abs().double().norm() for g in expected]), rtol=1e-6, atol=0)
