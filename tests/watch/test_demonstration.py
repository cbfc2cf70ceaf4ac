"""The demonstration: an ordinary script, watched, and clipped as advised.

Without clipping the run is chaotic: another processor adds in another order, and a seed that swings on one does not on
the next. So nothing here depends on a single run.
"""

import importlib.util
import math
import re
import sys
from pathlib import Path
from statistics import median

import pytest

import gradrein

EXAMPLES = Path(__file__).parents[2] / "examples"
SEEDS = range(3)


def swing(losses):
    """The mean of log10(loss / lowest so far)."""
    return sum(math.log10(loss / min(losses[: i + 1])) for i, loss in enumerate(losses)) / len(losses)


def test_the_script_does_not_mention_us():
    text = (EXAMPLES / "weighted_power_loss.py").read_text()
    assert "gradrein" not in text
    assert "clip" not in text


def example(name):
    pytest.importorskip("sklearn", reason="pip install 'gradrein[demo]'")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_clipping_steadies_it(monkeypatch, capsys):
    """In the median of several seeds."""
    script = example("weighted_power_loss")

    def train(seed, clip):
        monkeypatch.setattr(sys, "argv", ["script", "--seed", str(seed), "--epochs", "20"])
        with gradrein.Monitor(clip=clip):
            script.main()
        return [float(found) for found in re.findall(r"test\s+(\S+)", capsys.readouterr().out)]

    before = [train(seed, None) for seed in SEEDS]
    after = [train(seed, "auto") for seed in SEEDS]
    for measure in (lambda run: run[-1], min, swing):
        assert median(map(measure, after)) < median(map(measure, before))


def test_the_demonstration_compares_what_is_advised_and_what_is_kept(tmp_path, monkeypatch, capfd):
    demo = example("demo_steady")
    monkeypatch.setattr(sys, "argv", ["demo_steady.py", str(tmp_path), "--epochs", "10"])
    demo.main()
    rows = re.findall(
        r"^(as it is|advised first|kept by --try)\b[^\n]*?((?:\s+[\d.e+-]+){4})(?:   still falling)?$",
        capfd.readouterr().out,
        flags=re.MULTILINE,
    )
    assert [name for name, _ in rows] == ["as it is", "advised first", "kept by --try"]
    assert all(float(value) >= 0 for _, values in rows for value in values.split())
    ends = [float(values.split()[1]) for _, values in rows]
    assert ends[2] == min(ends)
    assert "What was tried" in (tmp_path / "try" / "try.html").read_text()
