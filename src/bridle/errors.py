"""Every error bridle raises.

Each is also the builtin that people already catch, so `except RuntimeError` around a torch call keeps working
when the import line changes.

```
BridleError
├── ArgumentError (ValueError)                 an argument that cannot mean anything
│   ├── ArgumentTypeError (TypeError)          an argument of a type that cannot mean anything
│   └── CallArgumentError (RuntimeError)       the same, where torch's own function raises RuntimeError
├── GradientTypeError (TypeError)              something that is not a parameter where one is expected
│   └── NotAParameterError (AttributeError)    the same, where torch's own function raises AttributeError
├── UnsupportedGradientError (NotImplementedError)   a kind of gradient we do not handle, by name
├── UnsupportedOperationError (NotImplementedError)  an op that we cannot handle exactly, and refuse to guess
│   └── BatchCouplingError                     one sample's loss depends on another sample
├── NonFiniteGradientError (RuntimeError)      a NaN or infinite gradient, with the names of its holders
├── BackwardError (RuntimeError)               a backward pass that could not run, and the cause
│   ├── UnusedInputError                       inputs without a gradient, each by name and with its reason
│   ├── GraphFreedError                        a graph that was already freed, and where this one enters it
│   ├── InplaceModifiedError                   saved values that were changed in place: all of them
│   ├── NoGraphError                           an output that has no recorded graph, and why
│   ├── NonScalarOutputError                   an output that is not a real scalar, without a gradient
│   ├── GradientMismatchError                  a gradient whose number, shape, dtype or device does not fit
│   └── ReplayError                            a graph that `autograd.replay` cannot run correctly
├── AuditError (RuntimeError)                  per-sample gradients do not add up to autograd's own
├── RankError (RuntimeError)                   ranks that do not agree, or one that is gone or late
├── UnsupportedDeviceError (RuntimeError)      a path was forced that this device does not have
├── FoldError (RuntimeError)                   an optimizer that cannot take the clipping coefficient
├── RecordError (ValueError)                   a file that is no record of a run, or a damaged one
│   └── RecordWriteError (OSError)             a record that cannot be written where it was asked for
└── MissingDependencyError (ImportError)       a package that an extra brings is not installed
BridleWarning (UserWarning)                    something was done as asked, and is probably not what was meant
```

A message says where, what was found, and what to do about it.
"""

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AuditError",
    "BackwardError",
    "BatchCouplingError",
    "BridleError",
    "BridleWarning",
    "CallArgumentError",
    "FoldError",
    "GradientMismatchError",
    "GradientTypeError",
    "GraphFreedError",
    "InplaceModifiedError",
    "MissingDependencyError",
    "NoGraphError",
    "NonFiniteGradientError",
    "NonScalarOutputError",
    "NotAParameterError",
    "RankError",
    "RecordError",
    "RecordWriteError",
    "ReplayError",
    "UnsupportedDeviceError",
    "UnsupportedGradientError",
    "UnsupportedOperationError",
    "UnusedInputError",
]


class BridleError(Exception):
    """The root: `except bridle.errors.BridleError` catches everything bridle raises on purpose.

    See Also:
        [`bridle.errors.BridleWarning`][]
    """


class ArgumentError(BridleError, ValueError):
    """An argument that cannot mean anything, such as a negative threshold.

    See Also:
        [`bridle.errors.ArgumentTypeError`][], [`bridle.errors.CallArgumentError`][]
    """


class CallArgumentError(ArgumentError, RuntimeError):
    """An argument that cannot mean anything, in a function whose torch original raises RuntimeError.

    See Also:
        [`bridle.errors.ArgumentError`][], [`bridle.call_for_per_sample_grads`][]
    """


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of a type that cannot mean anything, such as None for a threshold.

    See Also:
        [`bridle.errors.ArgumentError`][]
    """


class GradientTypeError(BridleError, TypeError):
    """Something that is not a parameter where one is expected.

    See Also:
        [`bridle.errors.NotAParameterError`][], [`bridle.clip_`][]
    """


class NotAParameterError(GradientTypeError, AttributeError):
    """Something among parameters that is none, such as None; torch's functions raise AttributeError there.

    See Also:
        [`bridle.clip_grad_norm_`][], [`bridle.errors.GradientTypeError`][]
    """


class UnsupportedGradientError(BridleError, NotImplementedError):
    """A kind of gradient (integer, nested) that is not handled; the message says which.

    See Also:
        [`bridle.clip_`][]
    """


class NonFiniteGradientError(BridleError, RuntimeError):
    """A gradient holds NaN or infinite values.

    Attributes:
        offenders: name of each parameter whose gradient is non-finite, with how many values are.
        node: the op where it began, by torch's name; None if that was not looked for or not found.
        module: path of the module that op belongs to.
        operand: torch's name for the saved value that did it.
        rows: where in the first dimension of that value, which for most data is the number of the sample.

    See Also:
        [`bridle.clip_`][], [`bridle.detect_nonfinite`][]
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


class BackwardError(BridleError, RuntimeError):
    """A backward pass that could not run: torch's first line, then the cause and what to do.

    See Also:
        [`bridle.backward`][], [`bridle.grad`][]
    """


class UnusedInputError(BackwardError):
    """Inputs that get no gradient.

    Attributes:
        names: the name of each, or its number where it has no name.

    See Also:
        [`bridle.grad`][], [`bridle.autograd.find_unused_parameters`][]
    """

    def __init__(self, message: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.names = names


class GraphFreedError(BackwardError):
    """A backward pass through a graph that an earlier one has freed.

    Attributes:
        crossings: each place where this graph enters the freed one; empty if it is the same graph.

    See Also:
        [`bridle.backward`][]
    """

    def __init__(self, message: str, crossings: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.crossings = crossings


class InplaceModifiedError(BackwardError):
    """Values saved for the backward pass were changed in place.

    Attributes:
        stale: each of them, with its op, module, versions and likely writer.

    See Also:
        [`bridle.backward`][], [`bridle.graph.saved`][]
    """

    def __init__(self, message: str, stale: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.stale = stale


class NoGraphError(BackwardError):
    """An output that has no recorded graph.

    Attributes:
        causes: what was found that explains it.

    See Also:
        [`bridle.backward`][], [`bridle.per_sample`][]
    """

    def __init__(self, message: str, causes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.causes = causes


class NonScalarOutputError(BackwardError):
    """An output that is not a real scalar, without a gradient given for it.

    See Also:
        [`bridle.backward`][]
    """


class GradientMismatchError(BackwardError):
    """A gradient that does not fit its output in number, shape, dtype or device.

    See Also:
        [`bridle.backward`][], [`bridle.grad`][]
    """


class ReplayError(BackwardError):
    """`autograd.replay` cannot run this graph correctly; the message says what is in the way.

    See Also:
        [`bridle.autograd.replay`][]
    """


class RecordError(BridleError, ValueError):
    """A file that is not the record of a run, is of another version, or is damaged.

    See Also:
        [`bridle.watch.read_run`][]
    """


class RecordWriteError(RecordError, OSError):
    """A record that cannot be written where it was asked for. Raised before the run begins, never during it.

    See Also:
        [`bridle.Monitor`][]
    """


class MissingDependencyError(BridleError, ImportError):
    """A package that comes with an extra is not installed; the message has the line that installs it.

    See Also:
        [`bridle.Monitor`][]
    """


class UnsupportedDeviceError(BridleError, RuntimeError):
    """A code path was asked for by name that the tensors' device does not have.

    See Also:
        [`bridle.clip_grad_norm_`][]
    """


class RankError(BridleError, RuntimeError):
    """The ranks of a process group do not hold the same parameters, or one of them is gone or late.

    See Also:
        [`bridle.clip_`][], [`bridle.distributed.Placement`][]
    """


class UnsupportedOperationError(BridleError, NotImplementedError):
    """An op in the recorded graph that cannot be handled exactly, such as one whose per-sample gradients are unknown.

    Attributes:
        op: torch's name for the op.
        where: the parameter or module it stands at.

    See Also:
        [`bridle.per_sample`][], [`bridle.register_rule`][]
    """

    def __init__(self, message: str, op: str = "", where: str = "") -> None:
        super().__init__(message)
        self.op = op
        self.where = where


class BatchCouplingError(UnsupportedOperationError):
    """The loss of one sample depends on the data of another, as with batch normalisation in training.

    See Also:
        [`bridle.per_sample`][]
    """


class AuditError(BridleError, RuntimeError):
    """Per-sample gradients do not add up to what autograd computes itself.

    Attributes:
        parameter: name of the parameter for which they do not.

    See Also:
        [`bridle.persample.PerSample`][]
    """

    def __init__(self, message: str, parameter: str = "") -> None:
        super().__init__(message)
        self.parameter = parameter


class FoldError(BridleError, RuntimeError):
    """The optimizer cannot take the clipping coefficient into its own step.

    See Also:
        [`bridle.clip_`][], [`bridle.Clipper`][]
    """


class BridleWarning(UserWarning):
    """What was asked for was done, and is probably not what was meant.

    See Also:
        [`bridle.errors.BridleError`][]
    """
