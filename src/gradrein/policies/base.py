"""What a policy is, what it is shown, and what it can decide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from ..errors import ArgumentTypeError


@dataclass(frozen=True)
class Scale:
    """Multiply the gradients.

    Attributes:
        by: One factor for all gradients (0-dim), one for each (a vector), or for each a tensor that broadcasts to it.

    Examples:
        >>> gradrein.policies.Scale(by=torch.tensor(0.5))
        Scale(by=tensor(0.5000))

    See Also:
        [`gradrein.policies.Clamp`][], [`gradrein.policies.Skip`][], [`gradrein.policies.Policy`][]
    """

    by: Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class Clamp:
    """Limit every element to `[-limit, limit]`; for complex elements, limit the magnitude.

    Attributes:
        limit: The limit for all gradients.

    Examples:
        >>> gradrein.policies.Clamp(limit=0.1)
        Clamp(limit=0.1)

    See Also:
        [`gradrein.policies.Scale`][], [`gradrein.policies.Skip`][], [`gradrein.policies.Policy`][]
    """

    limit: float | Tensor


@dataclass(frozen=True)
class Skip:
    """Set the gradients to zero where a condition holds, and do something else where it does not.

    Attributes:
        when: The condition, a 0-dim bool tensor.
        otherwise: What to do if it is false; None for nothing.

    Examples:
        >>> from gradrein.policies import Scale, Skip
        >>> Skip(when=torch.tensor(False), otherwise=Scale(torch.tensor(1.0)))
        Skip(when=tensor(False), otherwise=Scale(by=tensor(1.)))

    See Also:
        [`gradrein.policies.Scale`][], [`gradrein.policies.Clamp`][], [`gradrein.policies.SkipSpikes`][]
    """

    when: Tensor
    otherwise: Scale | Clamp | None


Decision: TypeAlias = Scale | Clamp | Skip
"""What a policy can decide.

See Also:
    [`gradrein.policies.Policy`][]
"""


class GradientView(Protocol):
    """The gradients that a policy decides about, in one call. Norms are computed once per order.

    All ranks list the same ones: a gradient that only some of them have is refused before.

    Attributes:
        parameters: The parameters that have a gradient, each once.
        tensors: The gradient of each parameter. Do not write to it.
        values: What this rank holds of each gradient: the gradient, or the shard of a DTensor. Do not write to it.
        pattern: The name pattern that selected them, `"*"` if there was none.

    Examples:
        >>> class Print:
        ...     p = 2.0
        ...
        ...     def decide(self, grads):
        ...         print(grads.names(), grads.total_norm())
        ...         return gradrein.policies.Scale(torch.tensor(1.0))
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> _ = gradrein.clip_({"w": weight}, Print())
        ['w'] tensor(5., dtype=torch.float64)

    See Also:
        [`gradrein.policies.Policy`][], [`gradrein.clip_`][]
    """

    parameters: list[Tensor]
    tensors: list[Tensor]
    values: list[Tensor]
    pattern: str

    def names(self) -> list[str]:
        """Return the name of each parameter."""

    def keys(self) -> list[str]:
        """Return a stable key for each parameter: its name, or its index if names are not unique."""

    def norms(self, p: float = 2.0) -> Tensor:
        """Return the p-norm of each gradient over all ranks: a vector, float64 if the device supports it."""

    def total_norm(self, p: float = 2.0) -> Tensor:
        """Return the p-norm of all gradients as one vector: a 0-dim tensor."""

    def weights(self) -> list[Tensor]:
        """Return what this rank holds of each parameter."""

    @property
    def is_split(self) -> bool:
        """Whether this process may hold only a part of some gradients; then query each gradient separately."""

    def combined(self, each: Tensor, p: float = 1.0) -> Tensor:
        """Return what values of the part of each gradient here come to for the whole: a p-norm; for order 1, a sum.

        Every rank has to call this, so whether it is called must not depend on the values a rank holds.

        Args:
            each: A float64 value for each gradient, or a row of them for each kind of value.
            p: The order.
        """

    def combined_slices(self, slices: Sequence[Tensor], dims: Sequence[set[int]]) -> list[Tensor]:
        """Return the 2-norms of slices along some dimensions of each gradient, given those of this rank's part."""

    def refuse_disjoint(self, policy: str) -> None:
        """Raise if other ranks hold other parameters, for policies that each rank would decide for itself."""

    def refuse_partial(self, policy: str) -> None:
        """Raise if ranks hold summands of a gradient, for policies that change single elements."""


@runtime_checkable
class Policy(Protocol):
    """A clipping policy: any object with `p` and `decide`. There is no base class to inherit from.

    A policy may also have a method `check(grads)` that raises for gradients it cannot handle. All policies of a
    call are checked before any of them decides, so before any state or gradient is written. With `state_dict()` and
    `load_state_dict(saved)` a `Clipper` saves what it has learned.

    Attributes:
        p: The order of the norm it uses. The report shows this norm, and non-finite values are detected with it.

    Examples:
        >>> from gradrein.policies import GradientView, Scale
        >>> class Halve:
        ...     p = 2.0
        ...
        ...     def decide(self, grads: GradientView) -> Scale:
        ...         return Scale(grads.total_norm(self.p).new_tensor(0.5))
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> gradrein.clip_([weight], Halve()).norm_after
        2.5

    See Also:
        [`gradrein.clip_`][], [`gradrein.policies.GradientView`][], [`gradrein.policies.AdaptivePolicy`][]
    """

    @property
    def p(self) -> float:
        """The order of the norm that the policy uses."""

    def decide(self, grads: GradientView) -> Decision:
        """Decide, without writing to a gradient and without reading a value from a device. It may update its state."""


def is_stateful(policy: object) -> bool:
    """Return whether the state of a policy can be saved: it has `state_dict` and `load_state_dict`."""
    return hasattr(policy, "state_dict") and hasattr(policy, "load_state_dict")


def check(policy: Policy | None, grads: GradientView) -> None:
    """Let a policy refuse gradients that it cannot decide about."""
    refuse = getattr(policy, "check", None)
    if refuse is not None:
        refuse(grads)


def refuse_no_policy(given: object) -> None:
    """Refuse what is not a policy, with the call that would make one."""
    # Not isinstance: torch.compile cannot trace a runtime protocol.
    if callable(getattr(given, "decide", None)) and not isinstance(given, type):
        if not hasattr(given, "p"):
            raise ArgumentTypeError(
                f"a policy needs an attribute `p`, the order of the norm it uses, and {type(given).__name__} has none. "
                "Write `p = 2.0` in the class."
            )
        return
    if isinstance(given, str):
        raise ArgumentTypeError(
            f"a policy was expected, found the name {given!r}: names are for a Clipper, a Monitor and the command, "
            "which keep what a policy learns. Pass a policy such as gradrein.by_norm(1.0) or "
            "gradrein.policies.ByOvershoot(), built once before the loop, or build a gradrein.Clipper(optimizer, "
            '"auto").'
        )
    kind, instead = type(given).__name__, "gradrein.by_norm(1.0)"
    if isinstance(given, type):
        kind, instead = "the class", f"{given.__name__}(...), built once"
    elif isinstance(given, int | float) and not isinstance(given, bool):
        instead = f"gradrein.by_norm({given!r})"
    elif callable(given):
        kind, instead = "a function", "what it returns, as in gradrein.by_norm(1.0)"
    raise ArgumentTypeError(
        f"a policy was expected, found {kind}: {given!r:.80}. Pass {instead}, or a mapping from name patterns to "
        "policies."
    )
