"""torch's errors about a graph that can no longer be asked, in our words and with what to do."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

from ...errors import BridleError, GraphFreedError, InplaceModifiedError, UnsupportedOperationError


@contextmanager
def explain_errors(where: str) -> Generator[None, None, None]:
    """While active, tell what torch's error means for `where`; errors that are not known stay as they are."""
    try:
        yield
    except RuntimeError as error:
        raise_explained(where, error)


def raise_explained(where: str, error: RuntimeError) -> NoReturn:
    """Raise what torch's error means for `where`; one that is not known, or ours, as it is."""
    explained = None if isinstance(error, BridleError) else _explanation(where, str(error))
    if explained is None:
        raise error
    raise explained from error


def _explanation(where: str, torch_says: str) -> BridleError | None:
    if "already been freed" in torch_says:
        return GraphFreedError(
            f"per_sample: {where} was freed, by a backward pass or by per_sample itself. Ask before that, or call it "
            f"with retain_graph=True. torch says: {torch_says}",
            (),
        )
    if "inplace operation" in torch_says:
        return InplaceModifiedError(
            f"per_sample: {where} was changed in place since the forward pass. Compute a new tensor there, or ask "
            f"before the change. torch says: {torch_says}",
            (where,),
        )
    if "already unpacked once" in torch_says:
        return UnsupportedOperationError(
            f"per_sample: {where} is needed twice, and the checkpoint around it hands it out once. Leave that region "
            "without a checkpoint.",
        )
    if "donated buffers" in torch_says:
        return UnsupportedOperationError(
            f"per_sample: {where} goes through a compiled region that overwrites what it saved, so it can be asked "
            "only once. Set torch._functorch.config.donated_buffer = False before the region is compiled, or "
            "leave it uncompiled.",
            "CompiledFunctionBackward",
        )
    return None
