"""Every error bridle raises.

Each is also the builtin that people already catch, so `except RuntimeError` around a torch call keeps working
when the import line changes.

```
BridleError
├── ArgumentError (ValueError)                 an argument that cannot mean anything
├── GradientTypeError (TypeError)              something that is not a parameter where one is expected
├── UnsupportedGradientError (NotImplementedError)   a kind of gradient we do not handle, by name
├── NonFiniteGradientError (RuntimeError)      a NaN or infinite gradient, with the names of those that hold it
├── RecordError (ValueError)                   a file that is no record of a run, or a damaged one
├── MissingDependencyError (ImportError)       a package that an extra brings is not installed
├── UnsupportedDeviceError (RuntimeError)      a path was forced that this device does not have
└── FoldError (RuntimeError)                   an optimizer that cannot take the clipping coefficient
BridleWarning (UserWarning)                    something was done as asked, and is probably not what was meant
```

A message says where, what was found, and what to do about it.
"""

__all__ = [
    "ArgumentError",
    "BridleError",
    "BridleWarning",
    "FoldError",
    "GradientTypeError",
    "MissingDependencyError",
    "NonFiniteGradientError",
    "RecordError",
    "UnsupportedDeviceError",
    "UnsupportedGradientError",
]


class BridleError(Exception):
    """The root: `except bridle.errors.BridleError` catches everything bridle raises on purpose."""


class ArgumentError(BridleError, ValueError):
    """An argument that cannot mean anything, such as a negative threshold."""


class GradientTypeError(BridleError, TypeError):
    """Something that is not a parameter where one is expected."""


class UnsupportedGradientError(BridleError, NotImplementedError):
    """A kind of gradient (integer, nested) that is not handled; the message says which."""


class NonFiniteGradientError(BridleError, RuntimeError):
    """A gradient holds NaN or infinite values.

    Attributes:
        offenders: name of each parameter whose gradient is non-finite, with how many values are.
    """

    def __init__(self, message: str, offenders: dict[str, int] | None = None) -> None:
        super().__init__(message)
        self.offenders = offenders or {}


class RecordError(BridleError, ValueError):
    """A file that is not the record of a run, is of another version, or is damaged."""


class MissingDependencyError(BridleError, ImportError):
    """A package that comes with an extra is not installed; the message has the line that installs it."""


class UnsupportedDeviceError(BridleError, RuntimeError):
    """A code path was asked for by name that the tensors' device does not have."""


class FoldError(BridleError, RuntimeError):
    """The optimizer cannot take the clipping coefficient into its own step."""


class BridleWarning(UserWarning):
    """What was asked for was done, and is probably not what was meant."""
