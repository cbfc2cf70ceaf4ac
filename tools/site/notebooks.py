"""Run the notebooks in docs/notebooks and write their pages: python tools/site/notebooks.py [--run] [name ...].

A page (NAME.md) shows the cells of NAME.ipynb with the outputs that are stored there. With --run each notebook is run
from top to bottom first, and its new outputs are stored.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"
Notebook = dict[str, Any]


def run(notebook: Notebook, name: str) -> None:
    """Run all cells and store what they print, show and draw."""
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            cell["outputs"] = outputs(source(cell), names, f"{name}, cell {number}")


def outputs(code: str, names: dict[str, object], where: str) -> list[dict[str, object]]:
    """Run a cell; a last expression is shown, as in a notebook."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(tree, where, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), where, "eval"), names)
            if value is not None:
                print(value)
    text = out.getvalue().rstrip()
    made: list[dict[str, object]] = []
    if text:
        made.append({"output_type": "stream", "name": "stdout", "text": (text + "\n").splitlines(keepends=True)})
    return made + [{"output_type": "display_data", "metadata": {}, "data": {"image/png": one}} for one in pictures()]


def pictures() -> list[str]:
    """Return the open figures as PNG in base64, and close them."""
    made = []
    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        pyplot.figure(number).savefig(picture, format="png", dpi=90, bbox_inches="tight", metadata={"Software": None})
        made.append(base64.b64encode(picture.getvalue()).decode())
    pyplot.close("all")
    return made


def source(cell: dict[str, Any]) -> str:
    """Return the text of a cell."""
    return "".join(cell["source"])


def page(name: str, notebook: Notebook, folder: Path) -> str:
    """Return the cells as Markdown; pictures go into the folder."""
    parts = []
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"\[!\[([^\]]*)\]\([^)]*\)\]", r"[\1]", source(cell)))  # a page loads no badge
            continue
        parts.append(f"``` python\n{source(cell)}\n```")  # the space keeps tests of pages from running it twice
        for index, output in enumerate(cell["outputs"]):
            if output["output_type"] == "stream":
                parts.append(f"``` {{.text .wrap}}\n{''.join(output['text']).rstrip()}\n```")
            else:
                file = f"{name}-{number}-{index}.png"
                (folder / file).write_bytes(base64.b64decode(output["data"]["image/png"]))
                parts.append(f"![what the cell above draws]({file})")
    parts.append(f"[Download as a notebook]({name}.ipynb)")
    return "\n\n".join(parts) + "\n"


def write_pages(folder: Path, chosen: list[str] = (), *, again: bool = False) -> None:
    """Write the pages of the notebooks in a folder, or of those that are named."""
    for path in sorted(folder.glob("*.ipynb")):
        if not chosen or path.stem in chosen:
            notebook = json.loads(path.read_text())
            if again:
                run(notebook, path.name)
                path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
            path.with_suffix(".md").write_text(page(path.stem, notebook, folder))


if __name__ == "__main__":
    write_pages(NOTEBOOKS, [name for name in sys.argv[1:] if name != "--run"], again="--run" in sys.argv)
