"""Run the notebooks of the site: python tools/site/notebooks.py [name ...].

A notebook is a Python file in docs/notebooks/source with cells between lines `# %%` (code) and `# %% [markdown]`. Each
is run from top to bottom; the page (docs/notebooks/NAME.md) and the notebook for download (NAME.ipynb) get the outputs.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"


@dataclass
class Cell:
    """One cell with what it printed, showed and drew."""

    kind: str
    source: str
    text: str = ""
    pictures: list[bytes] = field(default_factory=list)


def cells_of(path: Path) -> list[Cell]:
    """Split a source file at its cell marks."""
    cells = []
    for part in path.read_text().split("# %%")[1:]:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            lines = (line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines())
            cells.append(Cell("markdown", "\n".join(lines)))
        else:
            cells.append(Cell("code", body.strip()))
    return cells


def run(cell: Cell, names: dict[str, object], where: str) -> None:
    """Run a cell; a last expression is shown, as in a notebook."""
    tree = ast.parse(cell.source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(tree, where, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
            if value is not None:
                print(value)
    cell.text = out.getvalue().rstrip()
    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        pyplot.figure(number).savefig(picture, format="png", dpi=110, bbox_inches="tight")
        cell.pictures.append(picture.getvalue())
    pyplot.close("all")


def page(name: str, cells: list[Cell]) -> str:
    """Write the cells as Markdown; pictures go beside it."""
    parts = []
    for number, cell in enumerate(cells):
        if cell.kind == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"``` python\n{cell.source}\n```")  # the space keeps tests of pages from running it twice
        if cell.text:
            parts.append(f"``` {{.text .wrap}}\n{cell.text}\n```")
        for index, picture in enumerate(cell.pictures):
            file = f"{name}-{number}-{index}.png"
            (NOTEBOOKS / file).write_bytes(picture)
            parts.append(f"![what the cell above draws]({file})")
    parts.append(f"[Download as a notebook]({name}.ipynb)")
    return "\n\n".join(parts) + "\n"


def notebook(cells: list[Cell]) -> dict[str, object]:
    """The same as an .ipynb document, format 4."""
    made = []
    for cell in cells:
        one: dict[str, object] = {"cell_type": cell.kind, "metadata": {}, "source": cell.source}
        if cell.kind == "code":
            outputs: list[dict[str, object]] = []
            if cell.text:
                outputs.append({"output_type": "stream", "name": "stdout", "text": cell.text + "\n"})
            for picture in cell.pictures:
                data = {"image/png": base64.b64encode(picture).decode()}
                outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
            one |= {"execution_count": None, "outputs": outputs}
        made.append(one)
    return {"cells": made, "metadata": {"language_info": {"name": "python"}}, "nbformat": 4, "nbformat_minor": 4}


def main() -> None:
    """Run those that are named, or all."""
    for source in sorted((NOTEBOOKS / "source").glob("*.py")):
        if sys.argv[1:] and source.stem not in sys.argv[1:]:
            continue
        cells, names = cells_of(source), {"__name__": "__main__"}
        for number, cell in enumerate(cells):
            if cell.kind == "code":
                run(cell, names, f"{source.name}, cell {number}")
        (NOTEBOOKS / f"{source.stem}.md").write_text(page(source.stem, cells))
        (NOTEBOOKS / f"{source.stem}.ipynb").write_text(json.dumps(notebook(cells), indent=1) + "\n")


if __name__ == "__main__":
    main()
