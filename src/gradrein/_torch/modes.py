"""What changes how a call runs: overrides, function transforms, dispatch modes, tracing, scripting."""

import sys
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, overrides
from torch._subclasses.fake_tensor import FakeTensor
from torch.jit import _builtins
from torch.utils._python_dispatch import _disable_current_modes

_MODE_KEYS = tuple(torch._C._TorchDispatchModeKey.__members__.values())
# The mode in which every result is a fake tensor, or None. In C alone: each call of a kernel asks.
fake_mode = partial(torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE)


def inside_func_transform() -> bool:
    """Return whether a `torch.func` transform is running."""
    return bool(torch._C._are_functorch_transforms_active())


def is_differentiated_by_func(tensor: Tensor) -> bool:
    """Return whether `torch.func.grad`, `jvp` or the like is differentiating with respect to this tensor."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_gradtrackingtensor(tensor) and (tensor.requires_grad or _has_tangent(tensor)):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _has_tangent(tensor: Tensor) -> bool:
    unpacked = torch.autograd.forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    return unpacked.tangent is not None


def traces_autograd() -> bool:
    """Return whether the compiler is tracing this call and is configured to trace autograd into its graph."""
    return torch.compiler.is_compiling() and getattr(torch._dynamo.config, "trace_autograd_ops", False)


def is_tensor_like(value: Any) -> bool:
    """Return whether this is a tensor, or acts as one for torch's functions."""
    return bool(overrides.is_tensor_like(value))  # type: ignore[no-untyped-call]


def overrides_functions(kind: type) -> bool:
    """Return whether tensors of this type override torch's functions."""
    disabled = torch._C._disabled_torch_function_impl
    return kind is not Tensor and getattr(kind, "__torch_function__", disabled) is not disabled


@contextmanager
def without_overrides() -> Generator[None, None, None]:
    """Disable tensor subclasses and modes, while open, so that they do not see what is read."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def default_modes() -> AbstractContextManager[object]:
    """Leave autocast, inference mode and a default device, while open.

    Autocast is for the forward pass, and would round our products. Torch does not watch tensors of inference mode for
    changes. A default device is for tensors of the model: ours lie where those lie that they are computed with.
    """
    enabled = [device for device in ("cpu", "cuda", "xpu", "mps") if torch.is_autocast_enabled(device)]
    if not enabled and not torch.is_inference_mode_enabled() and _default_is_cpu():
        return nullcontext()
    return _without_modes(enabled)


def _default_is_cpu() -> bool:
    try:
        return torch.get_default_device().type == "cpu"
    except AttributeError:  # torch 2.6, after `torch.set_default_device(None)`
        return True


@contextmanager
def _without_modes(autocast: Sequence[str]) -> Generator[None, None, None]:
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        for device in autocast:
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.device("cpu"))
        yield


def values_are_real(tensors: Sequence[Any]) -> bool:
    """Return whether these are tensors with values to read: not while compiling, not inside a vmap."""
    if inside_func_transform():
        return False
    if any(torch._C._get_dispatch_mode(key) is not None for key in _MODE_KEYS):
        return False
    legacy = torch._C._functorch.is_legacy_batchedtensor
    return not any(isinstance(tensor, Tensor) and (tensor.is_meta or legacy(tensor)) for tensor in tensors)


def fakes_values(tensors: Sequence[Tensor]) -> bool:
    """Return whether these are fake tensors, or any result would be: torch refuses to mix them with others."""
    return fake_mode() is not None or (bool(tensors) and isinstance(tensors[0], FakeTensor))


def same_shape(first: Sequence[int], second: Sequence[int]) -> bool:
    """Return whether two shapes are equal; while torch traces, unknown sizes become a guard."""
    if all(type(size) is int for size in (*first, *second)):
        return tuple(first) == tuple(second)
    from torch.fx.experimental.symbolic_shapes import expect_true, sym_eq  # slow to import, and rarely needed

    return bool(expect_true(sym_eq(torch.Size(first), torch.Size(second))))


def script_as(ours: Callable[..., Any], theirs: str) -> None:
    """Let `torch.jit.script` compile a call of our function as torch's operator of that name."""
    if _builtins._builtin_table is None:
        _builtins._builtin_ops.append((ours, theirs))  # torch builds its table from these when a script first needs it
    else:
        _builtins._builtin_table[id(ours)] = theirs


def script_instead(ours: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Let `torch.jit.script` compile `original` wherever it meets our wrapper of it."""
    setattr(ours, "__script_if_tracing_wrapper", True)  # in a class body the name would be mangled
    setattr(ours, "__original_fn", original)


def is_tracing() -> bool:
    """Return whether `torch.jit.trace` records what runs now."""
    return bool(torch._C._is_tracing())


T = TypeVar("T")


def unprofiled(call: Callable[[], T]) -> T:
    """Call where no profiler is at work, so that one can be set: in a new thread if there is one in this.

    A profiler that is written in C, such as `cProfile`, cannot be set again from Python once it was replaced.
    """
    if sys.getprofile() is None:
        return call()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()
