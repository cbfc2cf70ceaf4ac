"""What a policy is, what it is shown, and what it can decide."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ..errors import ArgumentTypeError


@dataclass(frozen=True)
class Scale:
    """Multiply the gradients.

    Attributes:
        by: One factor for all (0-dim), one for each (a vector), or for each a tensor that broadcasts over it.

    Examples:
        >>> bridle.policies.Scale(by=torch.tensor(0.5))
        Scale(by=tensor(0.5000))

    See Also:
        [`bridle.policies.Clamp`][], [`bridle.policies.Skip`][], [`bridle.policies.Policy`][]
    """

    by: Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Clamp:
    """Limit every element to `[-limit, limit]`; of a complex element, its magnitude.

    Attributes:
        limit: One for all, or for each gradient a tensor of its shape, None for one that is left alone.

    Examples:
        >>> bridle.policies.Clamp(limit=0.1)
        Clamp(limit=0.1)

    See Also:
        [`bridle.policies.Scale`][], [`bridle.policies.Skip`][], [`bridle.policies.Policy`][]
    """

    limit: float | Tensor | Sequence[Tensor | None]


@dataclass(frozen=True)
class Skip:
    """Set the gradients to zero where a condition holds, and do something else where it does not.

    Attributes:
        when: The condition, a 0-dim bool tensor.
        otherwise: What to do if it is false.

    Examples:
        >>> from bridle.policies import Scale, Skip
        >>> Skip(when=torch.tensor(False), otherwise=Scale(torch.tensor(1.0)))
        Skip(when=tensor(False), otherwise=Scale(by=tensor(1.)))

    See Also:
        [`bridle.policies.Scale`][], [`bridle.policies.Clamp`][], [`bridle.policies.SkipSpikes`][]
    """

    when: Tensor
    otherwise: Scale | Clamp


Decision: TypeAlias = Scale | Clamp | Skip
"""What a policy can decide.

See Also:
    [`bridle.policies.Policy`][]
"""


class GradientView(Protocol):
    """What a policy is shown: the gradients of one call that it is for. Norms are measured once per order.

    A parameter that is sharded over ranks is listed on all of them, also where a rank has no gradient of it.

    Attributes:
        parameters: The parameters that have a gradient, each once.
        tensors: The gradient of each. Do not write to it.
        values: What this rank holds of each gradient: itself, or of a DTensor the shard. Do not write to it.
        pattern: The name pattern that selected them, `"*"` where there was none.

    Examples:
        >>> class Print:
        ...     p = 2.0
        ...
        ...     def decide(self, grads):
        ...         print(grads.names(), grads.total_norm())
        ...         return bridle.policies.Scale(torch.tensor(1.0))
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> _ = bridle.clip_({"w": weight}, Print())
        ['w'] tensor(5., dtype=torch.float64)

    See Also:
        [`bridle.policies.Policy`][], [`bridle.clip_`][]
    """

    parameters: list[Tensor]
    tensors: list[Tensor]
    values: list[Tensor]
    pattern: str

    def names(self) -> list[str]:
        """Return the name of each parameter."""

    def keys(self) -> list[str]:
        """Return what to remember each by from step to step: its name, or its index where names are not unique."""

    def norms(self, p: float = 2.0) -> Tensor:
        """Return the p-norm of each gradient over all ranks: a vector, float64 where the device has it."""

    def total_norm(self, p: float = 2.0) -> Tensor:
        """Return the p-norm of all gradients as one vector: a 0-dim tensor."""

    def numels(self) -> list[int]:
        """Return how many elements each gradient has over all ranks."""

    def weights(self) -> list[Tensor]:
        """Return what this rank holds of each parameter."""

    def spans_ranks(self) -> bool:
        """Return whether some of the gradients lie on several ranks: then each has to be asked about by itself."""

    def over_ranks(self, each: Tensor, p: float = 1.0) -> Tensor:
        """Return what values of each gradient on this rank come to over all ranks: a p-norm; of order 1, a sum.

        Every rank has to ask, and so whether it asks must not depend on what it holds.

        Args:
            each: A float64 value for each gradient, or a row of them for each kind of value.
            p: The order.
        """

    def slices_over_ranks(self, slices: Sequence[Tensor], dims: Sequence[set[int]]) -> list[Tensor]:
        """Return the 2-norms of slices along some dimensions of each gradient, given those of this rank's part."""

    def refuse_plain_shards(self, policy: str) -> None:
        """Raise if a gradient is a shard in a plain tensor, for a policy that looks inside gradients."""

    def refuse_disjoint(self, policy: str) -> None:
        """Raise if other ranks hold other parameters, for a policy that each rank would decide for itself."""


@runtime_checkable
class Policy(Protocol):
    """A rule for clipping: any object with `p` and `decide`. There is nothing to inherit from.

    A policy may also have a method `check(grads)` that raises for gradients it cannot decide about. Every policy of a
    call is checked before any of them decides, so before anything is learned or written.

    Attributes:
        p: The order of the norm it looks at; the report shows that norm, and non-finite values are found by it.

    Examples:
        >>> from bridle.policies import GradientView, Scale
        >>> class Halve:
        ...     p = 2.0
        ...
        ...     def decide(self, grads: GradientView) -> Scale:
        ...         return Scale(grads.total_norm(self.p).new_tensor(0.5))
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> bridle.clip_([weight], Halve()).norm_after
        2.5

    See Also:
        [`bridle.clip_`][], [`bridle.policies.GradientView`][], [`bridle.policies.Stateful`][],
        [`bridle.policies.AdaptivePolicy`][]
    """

    @property
    def p(self) -> float:
        """The order of the norm it looks at."""

    def decide(self, grads: GradientView) -> Decision:
        """Decide, without writing to a gradient and without reading a value from a device. It may remember."""


@runtime_checkable
class Stateful(Policy, Protocol):
    """A policy whose memory can be saved.

    Examples:
        >>> isinstance(bridle.policies.ByMedian(), bridle.policies.Stateful)
        True

    See Also:
        [`bridle.policies.Policy`][], [`bridle.Clipper`][]
    """

    def state_dict(self) -> dict[str, Any]:
        """Return what it has learned."""

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from what was learned."""


def check(policy: Policy | None, grads: GradientView) -> None:
    """Let a policy refuse gradients that it cannot decide about."""
    refuse = getattr(policy, "check", None)
    if refuse is not None:
        refuse(grads)


def refuse_no_policy(found: object) -> None:
    """Refuse what is not a policy, with the call that would make one."""
    # Not isinstance: torch.compile cannot trace a runtime protocol.
    if callable(getattr(found, "decide", None)) and not isinstance(found, type):
        if not hasattr(found, "p"):
            raise ArgumentTypeError(
                f"a policy says by `p` which order of norm it looks at, and {type(found).__name__} has none. Write "
                "`p = 2.0` in the class."
            )
        return
    kind, instead = type(found).__name__, "bridle.by_norm(1.0)"
    if isinstance(found, type):
        kind, instead = "the class", f"{found.__name__}(...), built once"
    elif isinstance(found, int | float) and not isinstance(found, bool):
        instead = f"bridle.by_norm({found!r})"
    elif callable(found):
        kind, instead = "a function", "what it returns, as in bridle.by_norm(1.0)"
    raise ArgumentTypeError(
        f"a policy was expected, found {kind}: {found!r:.80}. Pass {instead}, or a mapping from name patterns to "
        "policies."
    )


def clip_factor(limit: float | Tensor, norm: Tensor) -> Tensor:
    """Return the factor that brings a norm down to a limit: exactly 1 below it, and 1 where the norm is not finite.

    Examples:
        >>> bridle.policies.clip_factor(1.0, torch.tensor([0.5, 4.0]))
        tensor([1.0000, 0.2500])

    See Also:
        [`bridle.policies.Scale`][], [`bridle.policies.Policy`][]
    """
    # Not a number over a tensor: torch makes that a reciprocal, which a tiny norm makes infinite.
    ceiling = limit.to(norm) if isinstance(limit, Tensor) else norm.new_full((), limit)
    factor = ceiling / norm
    # A subnormal factor is rounded down, so that the norm after clipping does not exceed the limit.
    tiny = torch.finfo(norm.dtype).tiny
    factor = torch.where(factor < tiny, torch.nextafter(factor, torch.zeros_like(factor)), factor)
    return torch.where((norm > ceiling) & (norm < math.inf), factor, 1.0)
