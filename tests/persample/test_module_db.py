"""Every module with parameters that torch ships sample inputs for."""

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's module database needs expecttest")

from .sweep import PAGE, page, table

# Refused, with the reason; everything else must be right.
REFUSED = {
    "BatchNorm1d": "BatchCouplingError",
    "BatchNorm2d": "BatchCouplingError",
    "BatchNorm3d": "BatchCouplingError",
    "LinearCrossEntropyLoss": "UnsupportedOperationError",
}


def test_right_or_refused(capsys):
    found = table()
    with capsys.disabled():
        print("\n" + "\n".join(f"{name:32} {kinds}" for name, kinds in found.items()))
    fine = {"right", "refused: one sample, no batch"}
    refused = {name: set(kinds) - fine for name, kinds in found.items() if set(kinds) - fine}
    assert refused.items() <= {name: {reason} for name, reason in REFUSED.items()}.items()
    assert len(found) > 30
    if torch.__version__.startswith("2.13"):  # the page is written on this one; others ship other inputs
        assert PAGE.read_text() == page(found)
