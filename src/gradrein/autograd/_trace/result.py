"""`Trace`: the record of a whole backward pass, as a table or a page."""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from ..._notebook import bars, card
from .grad_stats import GradStats, combine
from .html import page
from .records import ModuleSummary, NodeRecord, module_name, short


@dataclass(frozen=True)
class Trace:
    """The record of a backward pass, from `gradrein.trace`.

    Attributes:
        nodes: every node, in the order in which torch's engine runs them on one thread.
        seconds: duration of the pass, including the tracing.

    Examples:
        >>> w = torch.ones(2, requires_grad=True)
        >>> trace = gradrein.trace((w * 3).sum())
        >>> [node.op for node in trace.nodes]
        ['SumBackward0', 'MulBackward0', 'AccumulateGrad']

    See Also:
        [`gradrein.trace`][], [`gradrein.autograd.NodeRecord`][], [`gradrein.autograd.ModuleSummary`][]
    """

    nodes: tuple[NodeRecord, ...]
    seconds: float

    def by_module(self, depth: int | None = None) -> tuple[ModuleSummary, ...]:
        """Combine the nodes of each module, in the order in which the gradient reaches them.

        Args:
            depth: how many components of a path to keep: with 1, ``encoder.layers.0`` is counted in ``encoder``.
        """
        groups: dict[str | None, list[NodeRecord]] = {}
        for node in self.nodes:
            groups.setdefault(_prefix(node.module, depth), []).append(node)
        owner = [_prefix(node.module, depth) for node in self.nodes]
        entries: dict[str | None, set[int]] = {owner[0]: {0}} if owner else {}
        leaving: dict[str | None, list[GradStats | None]] = {}
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
                combine(self.nodes[entry].incoming for entry in sorted(entries.get(module, ()))),
                combine(leaving.get(module, ())),
                combine(node.incoming for node in nodes if node.op == "AccumulateGrad"),
            )
            for module, nodes in groups.items()
        )

    def __str__(self) -> str:
        header = ("module", "nodes", "ms", "entering", "leaving", "parameters", "zeros", "non-finite")
        rows = [header, *map(_row, self.by_module())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        return "\n".join([f"backward: {len(self.nodes)} nodes in {self.seconds * 1e3:.1f} ms", *lines])

    def _repr_html_(self) -> str:
        stats_by_module = ((module_name(one.module), one.parameters or one.entering) for one in self.by_module())
        norms = {name: stats.norm for name, stats in stats_by_module if stats is not None}
        title, _, table = str(self).partition("\n")
        return card(f"{title}; gradient norm by module", bars(norms), table)

    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write a self-contained page: the modules, the graph, and the gradient at every node.

        Args:
            path: the file to write.

        Returns:
            The path.
        """
        written = Path(path)
        written.write_text(page(self.nodes, self.by_module(), self.seconds), encoding="utf-8")
        return written


def _row(summary: ModuleSummary) -> tuple[str, ...]:
    def norm(stats: GradStats | None) -> str:
        return "-" if stats is None else short(stats.norm)

    combined = combine((summary.entering, summary.leaving, summary.parameters))
    return (
        module_name(summary.module),
        str(summary.nodes),
        f"{summary.seconds * 1e3:.2f}",
        norm(summary.entering),
        norm(summary.leaving),
        norm(summary.parameters),
        "-" if combined is None or not combined.size else f"{combined.zeros / combined.size:.0%}",
        "-" if combined is None else str(combined.nonfinite),
    )


def _prefix(module: str | None, depth: int | None) -> str | None:
    return module if module is None or depth is None else ".".join(module.split(".")[:depth])
