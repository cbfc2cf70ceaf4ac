"""The demonstration: an ordinary script, watched and held."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_script_knows_nothing_of_us():
    text = (EXAMPLES / "weighted_power_loss.py").read_text()
    assert "bridle" not in text
    assert "clip" not in text


def test_it_swings_and_is_held(tmp_path):
    pytest.importorskip("sklearn", reason="pip install 'bridle[demo]'")
    done = subprocess.run(
        [sys.executable, EXAMPLES / "demo_steady.py", tmp_path, "--epochs", "20"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the loss swings" in done.stderr
    rows = dict(re.findall(r"^(\w[^\n]*?)\s{2,}(\S+\s+\S+)$", done.stdout, flags=re.MULTILINE))
    for name in ("swing of the test loss (factor from one report to the next)", "best test loss", "final test loss"):
        before, after = map(float, rows[name].split())
        assert after < before
    assert "Before and after" in (tmp_path / "steady.html").read_text()
