"""The checks that people run on their own devices."""

import pytest

from gradrein.selftest._checks import CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_check(name, device, attention):
    CHECKS[name](device)
