"""The charts of the site draw what was measured, and say what was not."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="drawn with matplotlib: make test-docs")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "site"))
import charts


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(charts, "RESULTS", tmp_path)
    monkeypatch.setattr(charts, "CHARTS", tmp_path)
    return tmp_path


@pytest.mark.parametrize("draw", ["per_sample_methods", "per_sample_batches", "clip_limit"])
def test_what_was_not_measured_is_left_out_and_said(draw, folder, capsys):
    getattr(charts, draw)()
    assert f"{draw.replace('_', '-')} is left out" in capsys.readouterr().out
    assert not list(folder.iterdir())


def test_every_peer_that_was_measured_is_drawn(folder, capsys):
    methods = ["gradrein", "torch.func", "BackPACK"]
    rows = [{"batch": 8, "method": "plain", "clock": {"median": 1.0}}]
    rows += [{"batch": b, "method": m, "clock": {"median": 2.0}, "gradient_error": 0} for m in methods for b in (8, 32)]
    rows += [{"batch": 32, "method": "Opacus ghost", "refused": "cannot"}]
    (folder / "persample-batches-mlp.json").write_text(json.dumps({"rows": rows}))
    charts.per_sample_batches()
    drawn = (folder / "per-sample-batches.svg").read_text()
    assert all(f"<!-- {method} -->" in drawn for method in methods)
    assert "Opacus" not in drawn
    assert not capsys.readouterr().out
