"""The record of a backward pass: plain numbers and names, which keep no tensor alive."""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch

from ._stats import Stats, together


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node of the graph in one backward pass.

    Attributes:
        index: its place in the order of the pass.
        op: torch's name for it.
        module: path of the module it belongs to, '' for the model itself, None if nothing is known.
        exact: True if it was made in that module; False if that is the last module known before it.
        parameter: name of the leaf it writes the gradient of, if it is the end of the graph.
        shape: shape of the (first) value the op made, which is the shape of the gradient that comes in.
        dtype: its dtype.
        incoming: the gradient that came in, after hooks; None if none came or norms were not asked for.
        outgoing: the gradients it sent on, taken together.
        seconds: how long it ran, by the clock of the machine. On an accelerator that is the time to hand over
            the work. What runs inside counts: a checkpoint's second forward pass is in the first node that
            needs it.
        targets: index of each node it sends gradients to.
        sent: the gradient sent to each of them.
    """

    index: int
    op: str
    module: str | None
    exact: bool
    parameter: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    incoming: Stats | None
    outgoing: Stats | None
    seconds: float
    targets: tuple[int, ...]
    sent: tuple[Stats | None, ...]


@dataclass(frozen=True, slots=True)
class ModuleSummary:
    """The nodes of one module taken together.

    Attributes:
        module: its path, '' for the model itself, None for nodes whose module is not known.
        nodes: how many nodes it has.
        seconds: how long they ran.
        entering: the gradients that came into its nodes from outside, taken together.
        leaving: the gradients its nodes sent outside.
        parameters: the gradients of its own parameters.
    """

    module: str | None
    nodes: int
    seconds: float
    entering: Stats | None
    leaving: Stats | None
    parameters: Stats | None


@dataclass(frozen=True)
class Trace:
    """A backward pass that was watched, from `bridle.trace`.

    Attributes:
        nodes: every node, in the order in which torch's engine runs them on one thread.
        seconds: how long the pass took, the watching included.
    """

    nodes: tuple[NodeRecord, ...]
    seconds: float

    def by_module(self, depth: int | None = None) -> tuple[ModuleSummary, ...]:
        """Fold the nodes by module, in the order in which the gradient reaches them.

        Args:
            depth: how many names of a path to keep: with 1, ``encoder.layers.0`` counts to ``encoder``.
        """
        groups: dict[str | None, list[NodeRecord]] = {}
        for node in self.nodes:
            groups.setdefault(_cut(node.module, depth), []).append(node)
        owner = [_cut(node.module, depth) for node in self.nodes]
        entries: dict[str | None, set[int]] = {owner[0]: {0}} if owner else {}
        leaving: dict[str | None, list[Stats | None]] = {}
        for node in self.nodes:
            for target, sent in zip(node.targets, node.sent, strict=True):
                if owner[target] != owner[node.index]:
                    entries.setdefault(owner[target], set()).add(target)
                    leaving.setdefault(owner[node.index], []).append(sent)
        return tuple(
            ModuleSummary(
                module,
                len(nodes),
                sum(node.seconds for node in nodes),
                together(self.nodes[entry].incoming for entry in sorted(entries.get(module, ()))),
                together(leaving.get(module, ())),
                together(node.incoming for node in nodes if node.op == "AccumulateGrad"),
            )
            for module, nodes in groups.items()
        )

    def __str__(self) -> str:
        header = ("module", "nodes", "ms", "entering", "leaving", "parameters", "zeros", "non-finite")
        rows = [header, *map(_row, self.by_module())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        return "\n".join([f"backward: {len(self.nodes)} nodes in {self.seconds * 1e3:.1f} ms", *lines])

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write one page that needs nothing else: the modules, the graph, and the gradient at every node.

        Args:
            path: where to write it.

        Returns:
            The path.
        """
        from ._html import page

        written = Path(path)
        written.write_text(page(self), encoding="utf-8")
        return written

    def to_dot(self) -> str:
        """Return the graph in the language of Graphviz, the norm of each gradient on its edge."""
        lines = ["digraph backward {", '  node [shape=box, fontname="sans-serif"]']
        for node in self.nodes:
            name = node.parameter or node.op
            label = "\\n".join(_quoted(part) for part in (name, module_name(node.module), str(node.shape)))
            lines.append(f'  {node.index} [label="{label}"]')
            for target, sent in zip(node.targets, node.sent, strict=True):
                note = f' [label="{short(sent.norm)}"]' if sent is not None else ""
                lines.append(f"  {node.index} -> {target}{note}")
        return "\n".join([*lines, "}"])


def module_name(module: str | None) -> str:
    """Return a module's path as people read it."""
    return {"": "(model)", None: "?"}.get(module, str(module))


def short(norm: float) -> str:
    """Return a norm in few characters."""
    return f"{norm:.3g}"


def _row(summary: ModuleSummary) -> tuple[str, ...]:
    def norm(stats: Stats | None) -> str:
        return "-" if stats is None else short(stats.norm)

    everything = together((summary.entering, summary.leaving, summary.parameters))
    return (
        module_name(summary.module),
        str(summary.nodes),
        f"{summary.seconds * 1e3:.2f}",
        norm(summary.entering),
        norm(summary.leaving),
        norm(summary.parameters),
        "-" if everything is None or not everything.size else f"{everything.zeros / everything.size:.0%}",
        "-" if everything is None else str(everything.nonfinite),
    )


def _cut(module: str | None, depth: int | None) -> str | None:
    return module if module is None or depth is None else ".".join(module.split(".")[:depth])


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
