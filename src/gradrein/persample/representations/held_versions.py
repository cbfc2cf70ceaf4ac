"""Whether what answers are made of is still as it was: an answer is about the moment of the call."""

from collections.abc import Mapping

from torch import Tensor

from ...errors import InplaceModifiedError
from .base import SampleGrads


class HeldVersions:
    """The versions of everything that answers are made of: inputs that ops saved, gradients that were handed out.

    A change through ``.data`` or from outside torch leaves the version as it was, and is not seen here nor by autograd.
    """

    def __init__(self, gradients: Mapping[str, SampleGrads]) -> None:
        self._held = {name: _versions(one) for name, one in gradients.items()}

    def renew(self, name: str, one: SampleGrads) -> None:
        """Note that the gradients of a parameter are held in another representation from now on."""
        self._held[name] = _versions(one)

    def check(self) -> None:
        """Refuse to answer if anything was changed."""
        for name, held in self._held.items():
            for tensor, version in held:
                if tensor._version != version:
                    raise InplaceModifiedError(
                        f"per_sample: a tensor of shape {tuple(tensor.shape)} that the gradients of `{name}` depend "
                        f"on was changed in place since per_sample was called: it is at version {tensor._version}; "
                        f"expected version {version} instead. It is an input or an activation of the op that uses "
                        f"`{name}`, or what grads() or stream() returned. Query before the change, or change a copy.",
                        (name,),
                    )


def _versions(one: SampleGrads) -> list[tuple[Tensor, int]]:
    return [(tensor, tensor._version) for tensor in one.held_tensors if not tensor.is_inference()]
