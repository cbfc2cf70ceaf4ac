"""Every error gradrein raises.

Each is also a subclass of a built-in exception, so `except RuntimeError` around a torch call keeps working
when the import line changes.

```
GradreinError
├── ArgumentError (ValueError)                 an argument with an invalid value
│   ├── ArgumentTypeError (TypeError)          an argument of the wrong type
│   └── CallArgumentError (RuntimeError)       the same, where torch's own function raises RuntimeError
├── GradientTypeError (TypeError)              something that is not a parameter where one is expected
│   └── NotAParameterError (AttributeError)    the same, where torch's own function raises AttributeError
├── UnsupportedGradientError (NotImplementedError)   a kind of gradient that is not supported, by name
├── UnsupportedOperationError (NotImplementedError)  an op that cannot be handled exactly
│   └── BatchCouplingError                     one sample's loss depends on another sample
├── NonFiniteGradientError (RuntimeError)      a NaN or infinite gradient, with parameter names
├── BackwardError (RuntimeError)               a backward pass that could not run, and the cause
│   ├── UnusedInputError                       inputs without a gradient, by name and with the reason
│   ├── GraphFreedError                        a graph that was already freed, and where it is entered
│   ├── InplaceModifiedError                   saved values that were changed in place
│   ├── NoGraphError                           an output that has no recorded graph, and why
│   └── GradientMismatchError                  gradients that are missing, or do not match their outputs
├── AuditError (RuntimeError)                  per-sample gradients do not add up to autograd's own
├── PrivacyError (RuntimeError)                private training would not be what is accounted for
├── RankError (RuntimeError)                   ranks that do not agree, or one that exited or timed out
├── RecordError (ValueError)                   a file that is not a record of a run, or is damaged
│   └── RecordWriteError (OSError)             a record that cannot be written
├── StoreError (ValueError)                    a gradient store that is damaged, or made in another way
│   └── StoreWriteError (OSError)              a gradient store that cannot be written to
└── MissingDependencyError (ImportError)       an optional package is not installed
GradreinWarning (UserWarning)                    the call was executed, but is probably a mistake
```

Each message says where the problem is, what was found, and what to do.
"""

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AuditError",
    "BackwardError",
    "BatchCouplingError",
    "CallArgumentError",
    "GradientMismatchError",
    "GradientTypeError",
    "GradreinError",
    "GradreinWarning",
    "GraphFreedError",
    "InplaceModifiedError",
    "MissingDependencyError",
    "NoGraphError",
    "NonFiniteGradientError",
    "NotAParameterError",
    "PrivacyError",
    "RankError",
    "RecordError",
    "RecordWriteError",
    "StoreError",
    "StoreWriteError",
    "UnsupportedGradientError",
    "UnsupportedOperationError",
    "UnusedInputError",
]


class GradreinError(Exception):
    """The base class: `except gradrein.errors.GradreinError` catches everything that gradrein raises on purpose."""


class ArgumentError(GradreinError, ValueError):
    """An argument with an invalid value, such as a negative threshold."""


class CallArgumentError(ArgumentError, RuntimeError):
    """An invalid argument, in a drop-in for a torch function that raises RuntimeError."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of the wrong type, such as None for a threshold."""


class GradientTypeError(GradreinError, TypeError):
    """Something that is not a parameter where one is expected."""


class NotAParameterError(GradientTypeError, AttributeError):
    """Something that is not a parameter, such as None, where torch's functions raise AttributeError."""


class UnsupportedGradientError(GradreinError, NotImplementedError):
    """A kind of gradient (integer, nested) that is not supported; the message says which."""


class NonFiniteGradientError(GradreinError, RuntimeError):
    """A gradient has NaN or infinite values.

    Attributes:
        offenders: name of each parameter whose gradient is not finite, with the number of such values.
        node: the op where it began, by torch's name; None if the origin was not searched for or not found.
        module: path of the module that op belongs to.
        operand: torch's name for the saved value that caused it.
        rows: indices into the first dimension of that value, which is usually the sample.
    """

    def __init__(
        self,
        message: str,
        offenders: dict[str, int] | None = None,
        *,
        node: str | None = None,
        module: str | None = None,
        operand: str | None = None,
        rows: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.offenders = offenders or {}
        self.node = node
        self.module = module
        self.operand = operand
        self.rows = rows


class BackwardError(GradreinError, RuntimeError):
    """A backward pass that could not run. The message is torch's first line, then the cause and what to do."""


class UnusedInputError(BackwardError):
    """Inputs that get no gradient.

    Attributes:
        names: the name of each, or its index if it has no name.
    """

    def __init__(self, message: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names


class GraphFreedError(BackwardError):
    """A backward pass through a graph that an earlier one has freed.

    Attributes:
        crossings: each place where this graph enters the freed one; empty if it is the same graph.
    """

    def __init__(self, message: str, crossings: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.crossings = crossings


class InplaceModifiedError(BackwardError):
    """Values saved for the backward pass were changed in place.

    Attributes:
        stale: a description of each, with its op, module, versions and what probably wrote it.
    """

    def __init__(self, message: str, stale: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.stale = stale


class NoGraphError(BackwardError):
    """An output that has no recorded graph.

    Attributes:
        causes: the possible causes that were found.
    """

    def __init__(self, message: str, causes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.causes = causes


class GradientMismatchError(BackwardError):
    """Gradients that do not match the outputs in number, shape or dtype, or a missing one of a non-scalar."""


class RecordError(GradreinError, ValueError):
    """A file that is not the record of a run, has another version, or is damaged."""


class RecordWriteError(RecordError, OSError):
    """A record that cannot be written to the requested file. Raised before the run begins, never during it."""


class StoreError(GradreinError, ValueError):
    """A gradient store that is damaged, or whose gradients were projected in another way than those at hand."""


class StoreWriteError(StoreError, OSError):
    """A gradient store that cannot be written to. What was added before is unchanged."""


class MissingDependencyError(GradreinError, ImportError):
    """An optional package is not installed; the message has the install command."""


class RankError(GradreinError, RuntimeError):
    """The ranks of a process group disagree about a call or its parameters, or one of them exited or timed out."""


class UnsupportedOperationError(GradreinError, NotImplementedError):
    """An op in the recorded graph that cannot be handled exactly, such as one whose per-sample gradients are unknown.

    Attributes:
        op: torch's name for the op.
        where: the parameter or module where it occurs.
    """

    def __init__(self, message: str, op: str = "", where: str = "") -> None:
        super().__init__(message)
        self.op = op
        self.where = where


class BatchCouplingError(UnsupportedOperationError):
    """The loss of one sample depends on the data of another, as with batch normalisation in training mode."""


class AuditError(GradreinError, RuntimeError):
    """Per-sample gradients do not add up to the gradient that autograd computes.

    Attributes:
        parameter: the name of that parameter.
    """

    def __init__(self, message: str, parameter: str = "") -> None:
        super().__init__(message)
        self.parameter = parameter


class PrivacyError(GradreinError, RuntimeError):
    """Private training would not be what epsilon is accounted for; the message says why and what to do.

    See Also:
        [`gradrein.private.Private`][]
    """


class GradreinWarning(UserWarning):
    """The call was executed, but is probably a mistake."""
