"""The demonstration: an ordinary script, watched, and clipped as advised.

Without clipping the run is chaotic: another processor adds in another order, and a seed that swings on one does not on
the next. So nothing here depends on a single run.
"""

import importlib.util
import re
import sys
from pathlib import Path
from statistics import median

import pytest

import bridle
from bridle.watch.analysis.compare import above_lowest

from .processes import run_process

EXAMPLES = Path(__file__).parents[2] / "examples"
SEEDS = range(3)


def test_the_script_does_not_mention_us():
    text = (EXAMPLES / "weighted_power_loss.py").read_text()
    assert "bridle" not in text
    assert "clip" not in text


@pytest.fixture
def script():
    pytest.importorskip("sklearn", reason="pip install 'bridle[demo]'")
    spec = importlib.util.spec_from_file_location("weighted_power_loss", EXAMPLES / "weighted_power_loss.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_clipping_steadies_it(script, monkeypatch, capsys):
    """In the median of several seeds; and what calls for clipping is found in some of the runs without it."""

    def train(seed, clip):
        monkeypatch.setattr(sys, "argv", ["script", "--seed", str(seed), "--epochs", "20"])
        with bridle.Monitor(clip=clip) as monitor:
            script.main()
        losses = [float(found) for found in re.findall(r"test\s+(\S+)", capsys.readouterr().out)]
        report = monitor.report()
        assert report.run.test.values == pytest.approx(losses)
        return report, above_lowest(losses), min(losses), losses[-1]

    before = [train(seed, None) for seed in SEEDS]
    after = [train(seed, "auto") for seed in SEEDS]
    for name, i in (("swing of the test loss", 1), ("best test loss", 2), ("final test loss", 3)):
        assert median(run[i] for run in after) < median(run[i] for run in before), name
    assert any(run[0].advice.policy == "auto" for run in before)


def test_the_demonstration_compares_both(tmp_path):
    pytest.importorskip("sklearn", reason="pip install 'bridle[demo]'")
    done = run_process([sys.executable, EXAMPLES / "demo_steady.py", tmp_path, "--epochs", "20"])
    assert done.returncode == 0, done.stderr
    assert "bridle watch --clip auto" in done.stderr
    rows = dict(re.findall(r"^(\w[^\n]*?)\s{2,}(\S+\s+\S+)$", done.stdout, flags=re.MULTILINE))
    for name in ("final test loss", "lowest test loss", "test loss above its lowest so far (mean of log10)"):
        assert len(list(map(float, rows[name].split()))) == 2
    assert "Before and after" in (tmp_path / "steady.html").read_text()
