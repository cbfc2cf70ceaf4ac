"""What a rule is given, rules from outside, and which rule makes the per-sample gradients of a use."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ... import graph
from ..._torch.nodes import identity
from ...errors import ArgumentError, ArgumentTypeError
from .. import engine
from ..layout import NotSeparableError, Owners
from ..representations.base import Computed, Dense, SampleGrads
from .table import OP_TABLE, GradientRule, OpEntry, Step, without_suffix


@dataclass(eq=False)
class RuleContext:
    """One use of a parameter, or of a value made from parameters alone, by one op of the recorded graph.

    Attributes:
        op: what torch calls the op, such as ``AddmmBackward0``.
        node: the op, as torch recorded it.
        position: which of its inputs the value is, as an index into ``node.next_functions``.
        shape: shape of the value.
        gradients: gradient of the sum of all losses at each output of the op; None where there is none.
        layouts: for each output, which sample owns which element.
        samples: how many samples there are.
        gradient: the first of the gradients.
        layout: the first of the layouts.
    """

    op: str
    node: Node
    position: int
    shape: tuple[int, ...]
    gradients: tuple[Tensor | None, ...]
    layouts: tuple[Owners, ...]
    samples: int
    _cache: dict[str, Any] = field(default_factory=dict, repr=False)  # shared by the uses of one op
    gradient: Tensor = field(init=False)
    layout: Owners = field(init=False)

    def __post_init__(self) -> None:
        self.gradient, self.layout = self.gradients[0], self.layouts[0]  # type: ignore[assignment]  # not asked if None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the value."""
        return self._value.dtype

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros as the value is: of its dtype, on its device."""
        return torch.zeros(shape, dtype=self.dtype, device=self._value.device)

    @property
    def _value(self) -> Tensor | graph.OutputInfo:
        below, output_nr = self.node.next_functions[self.position]
        assert below is not None
        return graph.leaf_tensor(below) if graph.is_leaf(below) else graph.describe(below)[output_nr]

    def saved(self, name: str) -> Any:
        """Return what the op saved under torch's name for it, such as ``mat1`` or ``input``."""
        if name not in self._cache:
            try:
                value = getattr(self.node, f"_saved_{name}")
            except RuntimeError as error:
                engine.raise_explained(f"what `{self.op}` saved as `{name}`", error, self.node)
            if isinstance(value, Tensor):
                if value.layout is not torch.strided or value.is_nested:
                    raise NotSeparableError  # rules count on rows; torch's own backward knows what to do
                value = value.detach()
            self._cache[name] = value
        return self._cache[name]

    def run(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Run the op's backward with other gradients at its outputs; return what the value gets."""
        with torch.no_grad():
            answer = engine.call(self.node, gradients)[self.position]
        if answer is None:
            return self.zeros(*self.shape)
        if answer.is_sparse:
            answer = answer.to_dense()
        return answer.sum_to_size(self.shape)

    def scaled(self, weights: Tensor) -> list[Tensor | None]:
        """Return the gradients at the outputs with each sample's part multiplied by its weight."""
        out: list[Tensor | None] = []
        for gradient, layout in zip(self.gradients, self.layouts, strict=True):
            if gradient is None:
                out.append(None)
                continue
            w = weights.to(gradient)
            if layout.block is not None:
                cut = gradient.reshape(-1, layout.samples, layout.block) * w[:, None]
                out.append(cut.view(gradient.shape))
            else:
                owner = layout.each(gradient.device)
                out.append(gradient * torch.where(owner >= 0, w[owner.clamp(min=0)], 0))
        return out


# torch's name for an op, or a Python Function itself: others may have its name.
Op: TypeAlias = str | type[torch.autograd.Function]

# The rules that came from outside.
_RULES: dict[str | type, OpEntry] = {}


def register_rule(op: Op, rule: GradientRule, *, replace: bool = False) -> None:
    """Register the per-sample gradients of an op, for example of your own `torch.autograd.Function`.

    Args:
        op: your Function, or torch's name for one of its own ops in the recorded graph, such as ``AddmmBackward0``.
        rule: called with a `RuleContext`, which has the gradient at the op's output, the owner of each element of it,
            and what the op saved. It returns a tensor of shape (samples, *shape of the parameter).
        replace: allow replacing an existing rule.

    Raises:
        ArgumentError: there already is a rule for this op and `replace` is not set; or `op` is the name of a
            Function, which other Functions may share.
        ArgumentTypeError: `op` is not an op or `rule` is not a function.

    Examples:
        >>> import gradrein, torch
        >>> class Scale(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x, scale):
        ...         ctx.save_for_backward(x, scale)
        ...         return x * scale
        ...     @staticmethod
        ...     def backward(ctx, g):
        ...         x, scale = ctx.saved_tensors
        ...         return g * scale, (g * x).sum(0)
        >>> def scale_rule(ctx):
        ...     x, _ = ctx.node.saved_tensors
        ...     return ctx.layout.sums(ctx.gradient * x, ctx.shape)
        >>> gradrein.register_rule(Scale, scale_rule)
        >>> scale = torch.ones(2, requires_grad=True)
        >>> losses = Scale.apply(torch.tensor([[1., 2.], [3., 4.]]), scale).sum(1)
        >>> gradrein.per_sample(losses, {"scale": scale}).grads()["scale"]
        tensor([[1., 2.],
                [3., 4.]])

    See Also:
        [`gradrein.per_sample`][]
    """
    is_function = isinstance(op, type) and issubclass(op, torch.autograd.Function)
    if not (is_function or isinstance(op, str)) or not callable(rule):
        raise ArgumentTypeError(
            f"register_rule: expected a torch.autograd.Function and a function, as in register_rule(Scale, rule); "
            f"found {op!r:.40} and {rule!r:.40}."
        )
    if isinstance(op, str) and op.endswith("Backward") and not op.startswith("GeneratedBackwardFor_"):
        raise ArgumentError(
            f"register_rule: {op!r} is the name of a Python Function, and other Functions may share it. Pass the "
            f"Function itself: register_rule({op.removesuffix('Backward')}, rule). torch's own ops go by name, such as "
            "'AddmmBackward0'."
        )
    if _rule_entry(op) is not None and not replace:
        name = op if isinstance(op, str) else op.__qualname__
        raise ArgumentError(f"register_rule: there is a rule for `{name}` already. Pass replace=True to replace it.")
    _RULES[op] = OpEntry(Step.mixed, rule=rule, runs_op=True)


def registered() -> dict[str | type, OpEntry]:
    """Return the rules that were registered by `register_rule`, by their ops."""
    return dict(_RULES)


def _rule_entry(op: str | type) -> OpEntry | None:
    """Return the entry with the rule of an op, if it has one; that from outside comes first."""
    if op in _RULES:
        return _RULES[op]
    entry = OP_TABLE.get(without_suffix(op)) if isinstance(op, str) else None
    return None if entry is None or entry.rule is None else entry


def has_rule(node: Node) -> bool:
    """Return whether there is a rule for the op."""
    return _rule_entry(identity(node)) is not None


def running_op(ops: Iterable[str]) -> set[str]:
    """Return the ops whose rule may run them, which inside the engine would leave out what it was not asked for."""
    entries = {op: _rule_entry(op) for op in ops}
    return {op for op, entry in entries.items() if entry is None or entry.runs_op}


def apply(uses: Sequence[RuleContext]) -> list[SampleGrads]:
    """Return the per-sample gradients of each of the uses of one op, by its rule or by the general way."""
    op, node, gradients = uses[0].op, uses[0].node, uses[0].gradients
    if all(g is None or owned.is_empty for g, owned in zip(gradients, uses[0].layouts, strict=True)):
        return [Dense(use.zeros().expand(use.samples, *use.shape)) for use in uses]  # no loss depends on the op
    # The names of torch's own ops end in a number, and tell them apart.
    entry = _rule_entry(op if "0" <= op[-1] <= "9" else identity(node))
    if entry is None or entry.rule is None or (gradients[0] is None and not entry.all_outputs):
        return [_one_by_one(use) for use in uses]
    grads = []
    for use in uses:
        try:
            answer = entry.rule(use)
        except NotSeparableError:
            answer = _one_by_one(use)
        grads.append(answer if isinstance(answer, SampleGrads) else _checked(use, answer))
    return grads


def _checked(ctx: RuleContext, answer: Tensor) -> SampleGrads:
    """Return the tensor that a rule answered, which must have the right shape."""
    expected = (ctx.samples, *ctx.shape)
    if tuple(answer.shape) != expected:
        raise ArgumentError(
            f"register_rule: the rule for `{ctx.op}` returned shape {tuple(answer.shape)}, expected "
            f"{expected}: one gradient per sample, each of the parameter's shape."
        )
    return Dense(answer)


def _one_by_one(ctx: RuleContext) -> SampleGrads:
    """The general way, right for every op: run its backward once for each sample, and once for a weighted sum.

    A backward is linear in the gradient it is given. Given only the part that one sample owns, it returns that
    sample's gradient.
    """

    def dense(part: slice) -> Tensor:
        picks = torch.eye(ctx.samples, dtype=torch.float64, device="cpu")
        return torch.stack([ctx.run(ctx.scaled(picks[i])) for i in range(*part.indices(ctx.samples))])

    def weighted(weights: Tensor) -> Tensor:
        if any(torch.promote_types(g.dtype, weights.dtype) != g.dtype for g in held):  # its dtype may not hold the sum
            return Computed(ctx.samples, ctx.shape, dense).weighted(weights)
        return ctx.run(ctx.scaled(weights))

    held = [g for g in ctx.gradients if g is not None]
    return Computed(ctx.samples, ctx.shape, dense, weighted, held_tensors=held, strategy="one by one", runs_op=True)
