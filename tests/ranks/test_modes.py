"""Ways of training: the table of docs/scale.md."""

import modes
import pytest


@pytest.mark.parametrize("case", modes.CASES, ids=lambda case: case.__name__)
def test_as_in_one_process(two, case):
    two.run(case)
