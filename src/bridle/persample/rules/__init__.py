"""What each op does to per-sample gradients. A rule is one function and one entry in this table."""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from ...errors import ArgumentError
from ..ownership.layout import NotSeparableError
from ..representations.base import Dense, Piece
from . import bilinear, conv, default, distance, elementwise, embedding, indexing, linear, members, norm, rnn
from .context import Use

Rule: TypeAlias = Callable[[Use], "Piece | Tensor"]

_RULES: dict[str, Rule] = {
    "AddmmBackward0": linear.addmm,
    "MmBackward0": linear.mm,
    "BmmBackward0": members.bmm,
    "BaddbmmBackward0": members.baddbmm,
    "GroupedMmBackward0": members.grouped_mm,
    "TrilinearBackward0": bilinear.trilinear,
    "ConvolutionBackward0": conv.convolution,
    "EmbeddingBackward0": embedding.embedding,
    "EmbeddingBagBackward0": embedding.embedding_bag,
    "IndexBackward0": indexing.index,
    "IndexSelectBackward0": indexing.index_select,
    "GatherBackward0": indexing.gather,
    "IndexPutBackward0": indexing.index_put,
    "CdistBackward0": distance.cdist,
    "EuclideanDistBackward0": distance.cdist,
    "NativeLayerNormBackward0": norm.layer_norm,
    "NativeGroupNormBackward0": norm.group_norm,
    "NativeBatchNormBackward0": norm.batch_norm,
    "MkldnnRnnLayerBackward0": rnn.lstm,
    "ReentrantCheckpointBackward": default.one_by_one,
    "ExpandBackward0": elementwise.expand,
    "RepeatBackward0": elementwise.repeat,
    "AddBackward0": elementwise.add,
    "MulBackward0": elementwise.multiply,
    "SubBackward0": elementwise.subtract,
    **dict.fromkeys(elementwise.CALLED, elementwise.broadcast),
}
# Rules that are content with what the op saved, so that they may be asked while the engine runs.
_CONTENT = set(_RULES) - set(elementwise.CALLED)
# Rules that look at more than the first output of their op.
_SEVERAL_OUTPUTS = frozenset({"MkldnnRnnLayerBackward0"})


def register_rule(op: str, rule: Rule, *, replace: bool = False) -> None:
    """Teach bridle the per-sample gradients of an op, for example of your own `torch.autograd.Function`.

    Args:
        op: torch's name for the op in the recorded graph. A Function called ``Scale`` is
            ``ScaleBackward``.
        rule: called with a `Use`, which has the gradient at the op's output, who owns which element of it,
            and what the op saved. It returns a tensor of shape (samples, *shape of the parameter).
        replace: allow an existing rule to be replaced.

    Raises:
        ArgumentError: there is a rule for this op already and `replace` was not given.

    Example:
        >>> import bridle, torch
        >>> class Scale(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x, scale):
        ...         ctx.save_for_backward(x, scale)
        ...         return x * scale
        ...     @staticmethod
        ...     def backward(ctx, g):
        ...         x, scale = ctx.saved_tensors
        ...         return g * scale, (g * x).sum(0)
        >>> def scale_rule(use):
        ...     x, _ = use.node.saved_tensors
        ...     return use.layout.sums(use.gradient * x, use.shape)
        >>> bridle.register_rule("ScaleBackward", scale_rule, replace=True)
        >>> scale = torch.ones(2, requires_grad=True)
        >>> losses = Scale.apply(torch.tensor([[1., 2.], [3., 4.]]), scale).sum(1)
        >>> bridle.per_sample(losses, {"scale": scale}).grads()["scale"]
        tensor([[1., 2.],
                [3., 4.]])
    """
    if op in _RULES and not replace:
        raise ArgumentError(f"register_rule: there is a rule for `{op}` already. Pass replace=True to replace it.")
    _RULES[op] = rule
    _CONTENT.discard(op)


def has_rule(op: str) -> bool:
    """Tell whether there is a rule for the op."""
    return op in _RULES


def calls_op(op: str) -> bool:
    """Tell whether the rule may run the op, which inside the engine would leave out what it was not asked for."""
    return op not in _CONTENT


def apply(use: Use) -> Piece:
    """Return the per-sample gradients of a use, by its rule or by the general way."""
    if all(g is None or owned.is_empty for g, owned in zip(use.gradients, use.layouts, strict=True)):
        return default.nothing(use)
    rule = _RULES.get(use.op)
    if rule is not None and (use.gradients[0] is not None or use.op in _SEVERAL_OUTPUTS):
        try:
            answer = rule(use)
        except NotSeparableError:
            return default.one_by_one(use)
        return answer if isinstance(answer, Piece) else _checked(use, answer)
    return default.one_by_one(use)


def _checked(use: Use, answer: Tensor) -> Piece:
    expected = (use.samples, *use.shape)
    if tuple(answer.shape) != expected:
        raise ArgumentError(
            f"register_rule: the rule for `{use.op}` returned shape {tuple(answer.shape)}, expected "
            f"{expected}: one gradient per sample, each of the parameter's shape."
        )
    return Dense(answer)
