"""Draw the diagrams of the concept pages: python tools/site/diagrams.py writes docs/concepts/*.svg."""

from __future__ import annotations

from html import escape
from pathlib import Path

CONCEPTS = Path(__file__).parents[2] / "docs" / "concepts"
STYLE = """
rect.page{fill:#ffffff} text{font:14px system-ui,sans-serif;fill:#1f2430} text.small{font-size:12px;fill:#555d70}
rect.box{fill:#eef1fb;stroke:#3f51b5;stroke-width:1.5;rx:6} rect.a{fill:#d7ecff;stroke:#1976d2} rect.b{fill:#ffe4c7;stroke:#e07b00}
rect.c{fill:#d9f2dd;stroke:#2e8b3d} rect.shared{fill:#eceef2;stroke:#697086} path{stroke:#3a4152;stroke-width:1.5;fill:none}
path.cut{stroke:#c62828;stroke-width:2;stroke-dasharray:7 5} text.cut{fill:#c62828}
"""


class Diagram:
    """Boxes, arrows and words on a white page, as SVG."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, text: str, kind: str = "", small: str = "") -> None:
        self.parts.append(f'<rect class="box {kind}" x="{x}" y="{y}" width="{w}" height="{h}"/>')
        self.text(x + w / 2, y + h / 2 + (5 if not small else -2), text, "middle")
        if small:
            self.text(x + w / 2, y + h / 2 + 15, small, "middle", "small")

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> None:
        self.parts.append(f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(f'<path d="M{x1} {y1} L{x2} {y2}" marker-end="url(#head)"/>')

    def cut(self, x1: float, y: float, x2: float, text: str) -> None:
        self.parts.append(f'<path class="cut" d="M{x1} {y} L{x2} {y}"/>')
        self.text(x2 + 8, y + 5, text, kind="cut")

    def svg(self) -> str:
        head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escape(self.title)}"><title>{escape(self.title)}</title><style>{STYLE}</style>'
            f'<defs>{head}<path d="M0 0 L8 4 L0 8 z" style="fill:#3a4152;stroke:none"/></marker></defs>'
            f'<rect class="page" width="{self.width}" height="{self.height}" rx="8"/>{"".join(self.parts)}</svg>\n'
        )


def graph() -> Diagram:
    d = Diagram(760, 300, "The forward pass records a graph; gradrein reads it")
    for x, name, saved in (
        (30, "Linear", "saves x, W"),
        (200, "ReLU", "saves its output"),
        (370, "Linear", "saves h, V"),
    ):
        d.box(x, 40, 120, 50, name, small=saved)
    d.box(540, 40, 120, 50, "loss", small="one per sample")
    for x in (150, 320, 490):
        d.arrow(x, 65, x + 48, 65)
    d.text(30, 28, "forward pass", kind="small")
    names = ((30, "AddmmBackward0"), (200, "ReluBackward0"), (370, "AddmmBackward0"), (540, "NllLossBackward0"))
    for x, name in names:
        d.box(x, 150, 140, 40, name, "shared")
    for x in (200, 370, 540):
        d.arrow(x, 170, x - 28, 170)
    d.text(30, 138, "recorded graph, read from the loss down", kind="small")
    for x, name in ((40, "W (leaf)"), (380, "V (leaf)")):
        d.box(x, 235, 100, 36, name, "c")
        d.arrow(x + 50, 190, x + 50, 233)
    d.text(180, 258, "parameters end the graph: each use of one is found here", kind="small")
    return d


def owners() -> Diagram:
    d = Diagram(760, 380, "Owners above the cut, shared values below it")
    kinds = ("a", "b", "c")
    for i, kind in enumerate(kinds):
        d.box(60 + 150 * i, 20, 110, 36, f"loss {i + 1}", kind)
        d.arrow(115 + 150 * i, 56, 115 + 150 * i, 92)
        d.box(60 + 150 * i, 94, 110, 44, f"rows of {i + 1}", kind, "relu, attention, ...")
        d.arrow(115 + 150 * i, 138, 115 + 150 * i, 178)
    d.box(60, 180, 410, 44, "Addmm: x W^T", small="x was saved; the gradient of each row has one owner")
    d.cut(30, 246, 500, "the cut")
    d.arrow(265, 224, 265, 268)
    d.box(190, 270, 150, 36, "W^T", "shared")
    d.arrow(265, 306, 265, 330)
    d.box(190, 332, 150, 36, "W (parameter)", "shared")
    d.text(540, 60, "above: every element", kind="small")
    d.text(540, 78, "has one owner", kind="small")
    d.text(540, 300, "below: made from parameters", kind="small")
    d.text(540, 318, "alone, shared by all samples", kind="small")
    return d


def clipping() -> Diagram:
    d = Diagram(760, 190, "Measure, decide, apply")
    steps = (
        ("gradients", "of any kind, on any ranks"),
        ("measure", "norms; one message"),
        ("decide", "the policy"),
        ("apply", "scale, clamp, zero"),
    )
    for i, (name, small) in enumerate(steps):
        d.box(20 + 185 * i, 50, 160, 54, name, "c" if i == 0 else "", small)
        if i:
            d.arrow(185 * i - 5, 77, 18 + 185 * i, 77)
    d.text(205, 140, "Scale, Clamp or Skip leave the policy as a value:", kind="small")
    d.text(205, 158, "it can be applied or only reported.", kind="small")
    return d


def record() -> Diagram:
    d = Diagram(760, 250, "During training one line per step is written; everything else happens afterwards")
    d.text(20, 26, "during training", kind="small")
    d.box(20, 40, 150, 50, "your script", "c", "unchanged")
    d.box(230, 40, 150, 50, "events", "", "backward, clip, step")
    d.box(440, 40, 150, 50, "train.gradrein.jsonl", "shared", "a line per step")
    d.arrow(170, 65, 228, 65)
    d.arrow(380, 65, 438, 65)
    d.text(20, 146, "afterwards", kind="small")
    d.box(20, 160, 150, 50, "run", "", "columns")
    d.box(230, 160, 150, 50, "findings, advice", "", "tests with evidence")
    d.box(440, 160, 150, 50, "report", "", "text, JSON, page")
    d.arrow(170, 185, 228, 185)
    d.arrow(380, 185, 438, 185)
    d.parts.append('<path d="M515 90 L515 118 L95 118 L95 158" marker-end="url(#head)"/>')
    return d


if __name__ == "__main__":
    for draw in (graph, owners, clipping, record):
        (CONCEPTS / f"{draw.__name__}.svg").write_text(draw().svg())
