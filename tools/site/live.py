"""Write the two pages that can be opened from the site, each from a real run: python tools/site/live.py [folder].

`trace.html` is the page of `gradrein.trace` for one backward pass of a small transformer. `report.html` is the page of
`gradrein watch --try` for examples/weighted_power_loss.py: run as it stands, and with the changes that are suggested.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

import gradrein

ROOT = Path(__file__).parents[2]
SCRIPT = "examples/weighted_power_loss.py"


class Classifier(torch.nn.Module):
    """Tokens through an embedding and two layers of attention to one of five classes."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, batch_first=True, norm_first=True)
        self.embed = torch.nn.Embedding(50, 32)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(32, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each sequence."""
        return self.head(self.encoder(self.embed(tokens)).mean(1))


def trace_page(path: Path) -> None:
    """Trace one backward pass and write its page."""
    torch.manual_seed(0)
    model = Classifier()
    tokens, classes = torch.randint(50, (8, 12)), torch.randint(5, (8,))
    with gradrein.graph.record_modules(model) as module_of:
        loss = F.cross_entropy(model(tokens), classes)
    gradrein.trace(loss, model, modules=module_of).to_html(path)


def report_page(path: Path) -> None:
    """Write the page of `gradrein watch --try` on the example."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gradrein", "watch", "--try", "--record", folder, SCRIPT]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
        if done.returncode:
            sys.exit(f"{SCRIPT} ended with {done.returncode}:\n{done.stderr.decode()}")
        page = Path(folder, "try.html").read_text()
    path.write_text(page.replace(f"{ROOT}/", ""))  # where this copy lies says nothing to a reader


def main() -> None:
    """Write both pages."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "live"
    folder.mkdir(parents=True, exist_ok=True)
    trace_page(folder / "trace.html")
    report_page(folder / "report.html")


if __name__ == "__main__":
    main()
