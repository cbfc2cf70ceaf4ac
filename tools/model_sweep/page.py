"""Write docs/models.md from the lines of a sweep: python tools/model_sweep/page.py models.jsonl."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEAD = """# Model families

`tools/model_sweep` builds every model type of the installed `transformers` from its own configuration with reduced
sizes, runs two batches of three samples, and compares the per-sample gradient of each parameter with one
backward pass per sample. Models are untrained, in evaluation mode, in float64 (float32 where kernels have no float64).

"""


def main() -> None:
    """Count the outcomes, name what is not right, list what is."""
    lines = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    by = Counter(line["outcome"] for line in lines)
    ran = len(lines) - by["not built"]
    errors = [line["error"] for line in lines if line["outcome"] == "right"]
    text = HEAD + f"With transformers {version('transformers')} and torch {version('torch')}, {ran} classes ran:\n\n"
    text += "| outcome | classes |\n|---|---|\n"
    text += f"| right (largest relative error {max(errors):.1g}) | {by['right']} |\n"
    for outcome in ("refused", "too slow", "crashed", "wrong"):
        text += f"| {outcome} | {by[outcome]} |\n"
    text += f"\n{by['not built']} more could not be built or run in this form, for reasons in transformers itself.\n"
    others = defaultdict(list)
    for line in lines:
        if line["outcome"] in ("refused", "too slow", "crashed", "wrong"):
            others[line["outcome"], line["why"].split(". ")[0]].append(line["class"])
    text += "\n## Not right\n" if others else ""
    for (outcome, why), classes in others.items():
        text += f"\n**{outcome}**, {why}: {', '.join(classes)}.\n"
    families = defaultdict(list)
    for line in lines:
        if line["outcome"] == "right":
            families[line["type"]].append(line["class"])
    text += f"\n## Right: {len(families)} families\n\n" + ", ".join(sorted(families)) + ".\n"
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
