"""Every error bridle raises.

Each is also the builtin that people already catch, so `except RuntimeError` around a torch call keeps working
when the import line changes.

```
BridleError
├── ArgumentError (ValueError)                 an argument that cannot mean anything
│   └── CallArgumentError (RuntimeError)       the same, where torch's own function raises RuntimeError
├── GradientTypeError (TypeError)              something that is not a parameter, or a gradient we cannot clip
├── NonFiniteGradientError (RuntimeError)      a NaN or infinite gradient, with the names of the holders
├── UnsupportedDeviceError (RuntimeError)      a path was forced that this device does not have
├── UnsupportedOperationError (NotImplementedError)
│   │                                          an op whose per-sample gradients we refuse to guess
│   └── BatchCouplingError                     one sample's loss depends on another sample
├── AuditError (RuntimeError)                  per-sample gradients do not add up to autograd's own
├── GraphStateError (RuntimeError)             the recorded graph is missing, freed or changed
└── FoldError (RuntimeError)                   an optimizer that cannot take the clipping coefficient
BridleWarning (UserWarning)                    something was done as asked, and is probably not what was meant
```

A message says where, what was found, and what to do about it.
"""

__all__ = [
    "ArgumentError",
    "AuditError",
    "BatchCouplingError",
    "BridleError",
    "BridleWarning",
    "CallArgumentError",
    "FoldError",
    "GradientTypeError",
    "GraphStateError",
    "NonFiniteGradientError",
    "UnsupportedDeviceError",
    "UnsupportedOperationError",
]


class BridleError(Exception):
    """The root: `except bridle.errors.BridleError` catches everything bridle raises on purpose."""


class ArgumentError(BridleError, ValueError):
    """An argument that cannot mean anything, such as a negative threshold."""


class CallArgumentError(ArgumentError, RuntimeError):
    """An argument that cannot mean anything, in a function whose torch original raises RuntimeError."""


class GradientTypeError(BridleError, TypeError):
    """Something that is not a parameter, or a gradient of a kind that cannot be clipped."""


class NonFiniteGradientError(BridleError, RuntimeError):
    """A gradient holds NaN or infinite values.

    Attributes:
        offenders: name of each parameter whose gradient is non-finite, with how many values are.
    """

    def __init__(self, message: str, offenders: dict[str, int] | None = None) -> None:
        super().__init__(message)
        self.offenders = offenders or {}


class UnsupportedDeviceError(BridleError, RuntimeError):
    """A code path was asked for by name that the tensors' device does not have."""


class UnsupportedOperationError(BridleError, NotImplementedError):
    """An op in the recorded graph whose per-sample gradients cannot be told, or not without being asked to.

    Attributes:
        op: torch's name for the op.
        where: the parameter or module it stands at.
    """

    def __init__(self, message: str, op: str = "", where: str = "") -> None:
        super().__init__(message)
        self.op = op
        self.where = where


class BatchCouplingError(UnsupportedOperationError):
    """The loss of one sample depends on the data of another, as with batch normalisation in training."""


class AuditError(BridleError, RuntimeError):
    """Per-sample gradients do not add up to what autograd computes itself.

    Attributes:
        parameter: name of the parameter for which they do not.
    """

    def __init__(self, message: str, parameter: str = "") -> None:
        super().__init__(message)
        self.parameter = parameter


class GraphStateError(BridleError, RuntimeError):
    """The recorded graph is missing, has been freed, or a tensor it needs was changed."""


class FoldError(BridleError, RuntimeError):
    """The optimizer cannot take the clipping coefficient into its own step."""


class BridleWarning(UserWarning):
    """What was asked for was done, and is probably not what was meant."""
