"""Every error bridle raises.

Each is also the builtin that people already catch, so `except RuntimeError` around a torch call keeps working
when the import line changes.

```
BridleError
├── ArgumentError (ValueError)                 an argument that cannot mean anything
├── GradientTypeError (TypeError)              something that is not a parameter, or a gradient we cannot clip
├── NonFiniteGradientError (RuntimeError)      a NaN or infinite gradient, with the names of those that hold it
├── ReplayError (RuntimeError)                 a graph that our own engine cannot run right
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
    "NonFiniteGradientError",
    "ReplayError",
    "UnsupportedDeviceError",
]


class BridleError(Exception):
    """The root: `except bridle.errors.BridleError` catches everything bridle raises on purpose."""


class ArgumentError(BridleError, ValueError):
    """An argument that cannot mean anything, such as a negative threshold."""


class GradientTypeError(BridleError, TypeError):
    """Something that is not a parameter, or a gradient of a kind that cannot be clipped."""


class NonFiniteGradientError(BridleError, RuntimeError):
    """A gradient holds NaN or infinite values.

    Attributes:
        offenders: name of each parameter whose gradient is non-finite, with how many values are.
        node: the op where it began, by torch's name; None if that was not looked for or not found.
        module: path of the module that op belongs to.
        operand: torch's name for the saved value that did it.
        rows: where in the first dimension of that value, which for most data is the number of the sample.
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


class ReplayError(BridleError, RuntimeError):
    """Our own engine was asked for a pass that it cannot run right, and says what is in the way."""


class UnsupportedDeviceError(BridleError, RuntimeError):
    """A code path was asked for by name that the tensors' device does not have."""


class FoldError(BridleError, RuntimeError):
    """The optimizer cannot take the clipping coefficient into its own step."""


class BridleWarning(UserWarning):
    """What was asked for was done, and is probably not what was meant."""
