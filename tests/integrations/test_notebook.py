"""A notebook is executed by a real kernel, and what it shows is looked at."""

import warnings

import pytest

nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
pytestmark = pytest.mark.filterwarnings("ignore")

CELLS = [
    """
import torch, gradrein
from gradrein.integrations.notebook import live_chart
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(16, 4)
""",
    """
with gradrein.Monitor(model, optimizer, on_step=live_chart(period=60.0)) as monitor:
    for step in range(40):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if step == 30:
            model[0].weight.grad[0, 0] = float("nan")
        optimizer.step()
""",
    "monitor",
    "monitor.findings()[0]",
    "monitor.report()",
    """
model = torch.nn.Linear(4, 1)
per = gradrein.per_sample(model(x).square().mean(1), model)
per
""",
    """
model(x).square().mean().backward()
gradrein.clip_(model, gradrein.by_norm(0.1))
""",
    "gradrein.trace(model(x).square().mean(), model)",
    "per.stats()",
    "per.audit()",
    "per.plan()",
    "monitor.advice()",
]


def test_a_notebook_shows_pictures(tmp_path):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [
        [out["data"]["text/html"] for out in cell.outputs if "text/html" in out.get("data", {})] for cell in book.cells
    ]
    assert [len(pages) for pages in shown] == [0, *[1] * 11]  # the chart is one output, updated in place
    assert "step 39: loss" in shown[1][0]
    for (page,) in shown[1:3] + shown[4:8] + shown[9:10]:
        assert "<svg" in page
    assert "nonfinite" in shown[3][0]
    assert "16 samples" in shown[5][0]
    largest = shown[5][0].partition("(sample ")[2].partition(")")[0]
    assert 0 <= int(largest) < 16
    for (page,) in (shown[8], shown[9]):
        assert "<table>" in page
    assert "noise_scale" in shown[8][0]
    assert "white-space:pre" in shown[10][0]
    assert "weight" in shown[10][0]
    assert "<b>" in shown[11][0]
