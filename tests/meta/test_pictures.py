"""What notebooks show of results: a picture, and everything from the user's program escaped."""

import math
from xml.etree import ElementTree

import pytest
import torch

import gradrein
from gradrein import _notebook
from gradrein.watch import Chart, Finding

EVIL = "<script>alert(1)</script>&\ud800"


def parsed(page):
    """Parse the fragment as XML, which an unescaped value would break, and return its texts."""
    page.encode()
    assert "<script" not in page
    return "".join(ElementTree.fromstring(page).itertext())


class Evil(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_module(EVIL, torch.nn.Linear(3, 2))

    def forward(self, x):
        return getattr(self, EVIL)(x)


def test_clip_report():
    model = Evil()
    model(torch.ones(2, 3)).sum().backward()
    report = gradrein.clip_(model, gradrein.by_norm(0.1))
    assert "clipped: norm" in parsed(report._repr_html_())
    assert "<svg" in report._repr_html_()
    both = gradrein.clip_(model, {"*weight": gradrein.by_norm(0.01), "*bias": gradrein.by_value(0.01)})
    assert "*weight" in parsed(both._repr_html_())
    assert "nothing to clip" in parsed(gradrein.clip_([], gradrein.by_norm(1.0))._repr_html_())


def test_per_sample():
    model = Evil()
    x = torch.randn(8, 3)
    per = gradrein.per_sample(model(x).square().mean(1), model)
    text = parsed(per._repr_html_())
    assert "8 samples" in text
    assert "told apart" in text
    assert "<svg" in per._repr_html_()


def test_per_sample_whose_values_were_changed_says_so():
    model = torch.nn.Linear(3, 2)
    x = torch.randn(8, 3)
    per = gradrein.per_sample(model(x).square().mean(1), model)
    x.add_(1.0)
    assert "their norms are not known" in parsed(per._repr_html_())


def test_trace():
    model = Evil()
    page = gradrein.trace(model(torch.ones(2, 3)).sum(), model)._repr_html_()
    assert "backward:" in parsed(page)
    assert "<svg" in page


def test_monitor_report_and_findings():
    model = Evil()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = gradrein.Monitor(model, optimizer)
    assert "not started" in parsed(monitor._repr_html_())
    with monitor:
        for t in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            if t == 3:
                next(model.parameters()).grad.fill_(math.inf)
            optimizer.step()
    assert "SGD, 5 steps" in parsed(monitor._repr_html_())
    assert "<svg" in monitor._repr_html_()
    findings = monitor.findings()
    assert findings == monitor.report().findings
    assert "not finite" in parsed(findings[0]._repr_html_())


@pytest.mark.parametrize(
    "chart",
    [
        None,
        Chart("t", {EVIL: [1.0, math.nan, 3.0]}, [0.0, 1.0, 2.0]),
        Chart("t", {}, []),
    ],
)
def test_finding(chart):
    finding = Finding("name", EVIL, 0.5, EVIL, {EVIL: EVIL}, EVIL, chart)
    assert "what to do" in parsed(finding._repr_html_())


VALUES = [[], [0.0], [math.nan] * 3, [1e308, -1e308], [5e-324, 0.0], [1.0, math.inf], [3.0] * 1000, list(range(2000))]


@pytest.mark.parametrize("values", VALUES, ids=lambda v: str(v)[:20])
def test_pictures_of_any_values(values):
    points = [(float(i), float(v)) for i, v in enumerate(values)]
    named = {f"{EVIL}{i}": float(v) for i, v in enumerate(values)}
    for page in (
        _notebook.curves([(EVIL, points)]),
        _notebook.bars(named),
        _notebook.bars(named, named),
        _notebook.histogram([float(v) for v in values]),
    ):
        parsed(f"<div>{page}</div>")
        assert '"nan' not in page  # no coordinate is
        assert len(page) < 30_000
