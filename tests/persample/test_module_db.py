"""Every module with parameters that torch ships sample inputs for."""

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's module database needs expecttest")

from torch.testing._internal import common_modules

from .sweep import PAGE, page, row, short_name, table

# Refused, with the reason; everything else must be right.
REFUSED = {
    "BatchNorm1d": "BatchCouplingError",
    "BatchNorm2d": "BatchCouplingError",
    "BatchNorm3d": "BatchCouplingError",
    "LinearCrossEntropyLoss": "UnsupportedOperationError",
}


# The page is written on this torch; others ship other inputs.
ON_PAGE = torch.__version__.startswith("2.13")


@pytest.mark.parametrize("info", common_modules.module_db, ids=short_name)
def test_right_or_refused(info):
    found = table([info])
    fine = {"right", "refused: one sample, no batch"}
    for name, kinds in found.items():
        assert set(kinds) - fine <= {REFUSED.get(name)}
        assert not ON_PAGE or row(name, kinds) in PAGE.read_text().splitlines()


def test_the_page_lists_no_other_module():
    head, ops = PAGE.read_text().split("## Ops")
    assert ops == page({}).split("## Ops")[1]
    listed = [line.split(" ")[1] for line in head.splitlines() if line.startswith("| ") and "sample inputs" not in line]
    assert listed == sorted(set(listed))
    assert len(listed) > 30
    if ON_PAGE:
        assert set(listed) <= {short_name(info) for info in common_modules.module_db}
