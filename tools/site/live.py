"""Write the two pages that can be opened from the site, each from a real run: python tools/site/live.py [folder].

`trace.html` is the page of `gradrein.trace` for one backward pass of a small transformer. `report.html` is the page of
`gradrein watch` for examples/weighted_power_loss.py, run as it stands and again with the clipping that was advised.
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
from gradrein.watch import Report, read_report

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


def watched(record: Path, *options: str) -> Report:
    """Run the example under `gradrein watch` and return its report."""
    command = [sys.executable, "-m", "gradrein", "watch", "--record", str(record), *options, SCRIPT]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    if done.returncode:
        sys.exit(f"{SCRIPT} ended with {done.returncode}:\n{done.stderr.decode()}")
    return read_report(record)


def before_and_after() -> tuple[Report, Report]:
    """Watch the example, clip as the report advises, and watch again."""
    with tempfile.TemporaryDirectory() as folder:
        before = watched(Path(folder, "before.jsonl"))
        first = before.advice.actions[0].try_with if before.advice.actions else "--clip auto"
        return before, watched(Path(folder, "after.jsonl"), *first.split())


def report_page(path: Path) -> None:
    """Write the page that compares both runs."""
    before, after = before_and_after()
    after.write_page(path, before=before)
    path.write_text(path.read_text().replace(f"{ROOT}/", ""))  # where this copy lies says nothing to a reader


def main() -> None:
    """Write both pages."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "live"
    folder.mkdir(parents=True, exist_ok=True)
    trace_page(folder / "trace.html")
    report_page(folder / "report.html")


if __name__ == "__main__":
    main()
