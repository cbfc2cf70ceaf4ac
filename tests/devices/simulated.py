"""An accelerator that is not there: the numbers are real, the host cannot read them, launches and reads are counted.

A tensor of the device is host memory under another device's name and at an address that the host does not have, so that
code which reads through a pointer crashes, as on a GPU. Every op is run by the CPU on the true address. There are two kinds:

- "cuda": torch's own CUDA key, with the ops that only CUDA has (`cuda_ops`), so that graphs hold the nodes they hold on a
  GPU. torch must believe in CUDA before it is imported, which needs a compiler (`cuda_hooks.cpp`).
- "sim": the key that torch keeps for other backends (PrivateUse1). It needs nothing.

What a launch is follows torch's CUDA kernels: one for an op, none for a view, and for a multi-tensor op as many as
torch's `multi_tensor_apply` makes. Not simulated: asynchrony, streams, speed, the rounding of GPU kernels, sparse and
nested tensors, `torch.compile`.
"""

import ctypes
import fcntl
import hashlib
import importlib.util
import math
import os
import shutil
import subprocess
import sys
import threading
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

KIND = os.environ.get("GRADREIN_DEVICE", "sim")
HERE = Path(__file__).parent


def build_cuda_hooks():
    """Compile what makes torch believe in CUDA, once for each torch, and return the library."""
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    source = HERE / "cuda_hooks.cpp"
    mark = hashlib.sha256(source.read_bytes() + (torch_folder / "version.py").read_bytes()).hexdigest()[:16]
    library = HERE.parents[1] / "build" / "devices" / f"cuda_hooks-{mark}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes
        if not library.exists():
            include, lib = torch_folder / "include", torch_folder / "lib"
            partial = library.with_suffix(".partial")
            command = [shutil.which("c++") or "g++", "-shared", "-fPIC", "-std=c++20", str(source), "-o", str(partial)]
            command += [f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-L{lib}", f"-Wl,-rpath,{lib}"]
            subprocess.run([*command, "-ltorch_cpu", "-lc10"], check=True)
            partial.rename(library)
    return library


if KIND == "cuda":
    assert "torch" not in sys.modules, "the simulated CUDA has to be there before torch is imported"
    hooks = ctypes.CDLL(str(build_cuda_hooks()))
    hooks.choose_attention.argtypes = [ctypes.c_int64]

# ruff: noqa: E402
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
KEY, _DLPACK_CODE = ("CUDA", 2) if KIND == "cuda" else ("PrivateUse1", 12)
if KIND == "cuda":
    torch.cuda._lazy_init = lambda: None
else:
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(KIND)
    getattr(torch, KIND).get_amp_supported_dtype = lambda: [torch.bfloat16]  # asked by checkpoints
DEVICE = torch.device(KIND, 0)

_FAR = 1 << 56  # beyond every address of the host
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


# --- Tensors of the device ------------------------------------------------------------------------------------------


def _relabelled(t, code, shift):
    """Return a tensor over the same memory that torch takes for one of another device."""
    capsule = torch._C._to_dlpack(t)
    struct = _capsule_pointer(capsule, b"dltensor")  # data pointer, then device type and number
    address = ctypes.c_uint64.from_address(struct)
    address.value += shift if address.value else 0
    ctypes.c_int32.from_address(struct + 8).value = code
    ctypes.c_int32.from_address(struct + 12).value = 0
    return torch._C._from_dlpack(capsule)


def to_device(t):
    """Return a tensor of the host as one of the device."""
    return _relabelled(t.resolve_conj().resolve_neg(), _DLPACK_CODE, _FAR)


def on_host(t):
    """Return a tensor of the device as the host's, uncounted: for kernels, and for what a test looks at."""
    if t.device.type != KIND:
        return t
    raw = _relabelled(t.detach(), 1, -_FAR)
    raw = raw.conj() if t.is_conj() else raw
    return torch._neg_view(raw) if t.is_neg() else raw


# --- Counting -------------------------------------------------------------------------------------------------------


@dataclass
class Counts:
    """What the device was asked for.

    Attributes:
        launches: Kernels, by op.
        reads: Where the host waited: (op or copy, file and line of ours).
    """

    launches: Counter = field(default_factory=Counter)
    reads: Counter = field(default_factory=Counter)

    def __str__(self):
        return f"{self.launches.total()} launches, {self.reads.total()} host reads {dict(self.reads) or ''}"


_open: list[Counts] = []
forbidding = False
without_float64 = False  # as MPS: an op that would make one is refused


@contextmanager
def counted():
    """Count launches and host reads of a block."""
    counts = Counts()
    _open.append(counts)
    try:
        yield counts
    finally:
        _open.remove(counts)


@contextmanager
def no_host_reads():
    """Raise where the host waits for the device."""
    global forbidding
    forbidding = True
    try:
        yield
    finally:
        forbidding = False


without_float64 = False  # as MPS: an op that would make one is refused


def launch(name, times=1):
    """Count a kernel."""
    for counts in _open:
        counts.launches[name] += times


def host_read(what):
    """Count that the host waits."""
    if not (_open or forbidding):
        return
    ours = [f for f in traceback.extract_stack() if "/src/gradrein/" in f.filename]
    where = f"{ours[-1].filename.rpartition('/src/gradrein/')[2]}:{ours[-1].lineno}" if ours else "outside of gradrein"
    for counts in _open:
        counts.reads[what, where] += 1
    if forbidding:
        raise AssertionError(f"the host reads from the device: {what} at {where}")


# Ops whose CUDA kernels wait, because the shape or the kind of the result depends on values.
_READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive"}
_READS |= {"bincount", "histc", "is_nonzero", "_coalesce"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}


def _waits(name, args, kwargs):
    if name in _INDEXED:  # a mask is turned into indices
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return name in _READS or (name == "repeat_interleave" and kwargs.get("output_size") is None)


def _multi_tensor_launches(name, args):
    """Return how many kernels CUDA launches for a multi-tensor op: few, or one for each tensor where it has no such."""
    lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    return _chunked(lists[0], len(lists)) + (name == "_foreach_norm") if _is_fused(name, lists, args) else len(lists[0])


def _is_fused(name, lists, args):
    first = lists[0]
    dtypes = {t.dtype for each in lists for t in each}
    alike = all([(t.shape, t.stride()) for t in each] == [(t.shape, t.stride()) for t in first] for each in lists)
    dense = all(torch._prims_common.is_non_overlapping_and_dense_or_false(t) for t in first)
    order = args[1] if len(args) > 1 else 2
    has_kernel = name != "_foreach_norm" or order in (0, 1, 2, math.inf)
    factors = [a for a in args[1:] if isinstance(a, Tensor)] if name.startswith("_foreach") else []
    fitting = all(f.dtype == first[0].dtype or f.device.type == "cpu" for f in factors)
    return alike and dense and has_kernel and fitting and (len(dtypes) == 1 or name == "_foreach_copy_")


def _chunked(tensors, lists):
    """Return how many kernels `multi_tensor_apply` launches: each takes so many tensors and so many chunks of them."""
    most_tensors, most_chunks = {1: 110, 2: 64, 3: 48}.get(lists, 36), 320
    launches = taken = chunks = 0
    for t in tensors:
        taken += 1
        for left in reversed(range(max(1, math.ceil(t.numel() / 65536)))):
            chunks += 1
            if chunks == most_chunks or (taken == most_tensors and not left):
                launches, chunks, taken = launches + 1, 0, int(left > 0)
    return launches + (chunks > 0)


# --- Kernels --------------------------------------------------------------------------------------------------------

_BY_INDEX_OF_THE_HOST = {*_INDEXED}  # torch copies their indices by itself


def kernel(op, *args, **kwargs):
    """Run any op of the device."""
    with torch._C.DisableTorchFunction():  # as if there were no default device
        return _run(op, args, kwargs)


def _run(op, args, kwargs):
    name = op._schema.name.removeprefix("aten::")
    returned = [r.alias_info for r in op._schema.returns]
    if name in ("set_", "is_set_to") or any(alias is not None and not alias.is_write for alias in returned):
        return op.redispatch(_CPU_KEYS, *args, **kwargs)  # a view: the memory is not touched
    if name in ("copy_", "_copy_from"):
        return _copy(name, *args, **kwargs)
    if name == "resize_":
        return _resize(*args)
    if _waits(name, args, kwargs):
        host_read(name)
    if name.startswith(("_foreach", "_amp_foreach")):
        launch(name, _multi_tensor_launches(name, args))
    elif name not in ("empty", "empty_strided"):
        launch(name)
    if name not in _INDEXED and "_foreach" not in name:
        _refuse_mixed_devices(op, args, kwargs)
    return _compute(op, args, kwargs, is_inplace=any(alias is not None for alias in returned))


def _refuse_mixed_devices(op, args, kwargs):
    for t in tree_leaves((args, kwargs)):
        if isinstance(t, Tensor) and t.device.type == "cpu" and t.dim():
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {DEVICE} and cpu ({op})")


def _compute(op, args, kwargs, *, is_inplace):
    """Run an op on the CPU over the memory of the device, and return tensors of the device."""
    written, results = [], []

    def here(value, argument):
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == KIND else value
        if not isinstance(value, Tensor) or value.device.type != KIND:
            return value
        if argument.alias_info is None or not argument.alias_info.is_write:
            return on_host(value)
        written.append(value)
        if not argument.kwarg_only:
            return on_host(value)
        results.append((value, torch.empty(0, dtype=value.dtype)))  # `out=`, which may change its shape
        return results[-1][1]

    schema = op._schema.arguments
    named = {argument.name: argument for argument in schema}
    args = [tree_map(lambda v, a=a: here(v, a), value) for a, value in zip(schema, args, strict=False)]
    kwargs = {key: tree_map(lambda v, a=named[key]: here(v, a), value) for key, value in kwargs.items()}
    numbers = any(
        str(a.type) == "Tensor" and isinstance(v, int | float | complex) for a, v in zip(schema, args, strict=False)
    )
    answer = (op.overloadpacket if numbers else op)(*args, **kwargs)
    if without_float64 and any(t.dtype == torch.float64 for t in tree_leaves(answer) if isinstance(t, Tensor)):
        raise TypeError(f"the device has no float64 ({op})")
    for device_tensor, host_tensor in results:
        if device_tensor.shape == host_tensor.shape:
            on_host(device_tensor).copy_(host_tensor)
        else:
            device_tensor.set_(to_device(host_tensor))
    if is_inplace:
        return written[0] if len(op._schema.returns) == 1 else tuple(written)
    given = {t.data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.numel()}

    def there(value):
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            return value
        return to_device(value.clone() if value.numel() and value.data_ptr() in given else value)

    return tree_map(there, answer)


def _copy(name, first, second, non_blocking=False):
    source, target = (first, second) if name == "_copy_from" else (second, first)
    if target.device.type == "cpu":
        host_read("copy to the host")
    elif source.device.type == "cpu" and not non_blocking:
        host_read("copy from the host")  # from memory that is not pinned, torch waits
    launch("copy_")
    on_host(target).copy_(on_host(source))
    return target


def _resize(t, size, memory_format=None):
    if t.untyped_storage().nbytes() < math.prod(size) * t.element_size():
        t.set_(to_device(torch.empty(size, dtype=t.dtype)))
        return t
    return aten.resize_.default.redispatch(_CPU_KEYS, t, size)


_fallback = torch.library.Library("_", "IMPL")
_fallback.fallback(kernel, KEY)
library = torch.library.Library("aten", "IMPL")


def _give_kernel(name):
    op = getattr(getattr(aten, name.partition(".")[0]), name.partition(".")[2] or "default")
    library.impl(name, lambda *args, **kwargs: kernel(op, *args, **kwargs), KEY)


def _convolution(x, w, b, stride, padding, dilation, transposed, output_padding, groups):
    return kernel(aten.convolution.default, x, w, b, stride, padding, dilation, transposed, output_padding, groups)


def _convolution_backward(g, x, w, stride, padding, dilation, transposed, output_padding, groups, mask):
    sizes = [w.shape[1] * groups if transposed else w.shape[0]]
    rest = (sizes, stride, padding, dilation, transposed, output_padding, groups, mask)
    return kernel(aten.convolution_backward.default, g, x, w, *rest)


def _start():
    """Register what a backend has kernels of its own for: torch would otherwise compose it from other ops."""
    fused = [n.removeprefix("aten::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::_foreach")]
    for name in [*fused, "copy_"]:
        base, _, overload = name.partition(".")
        if not name.endswith("out") and hasattr(getattr(aten, base), overload or "default"):
            _give_kernel(name)
    if KIND == "cuda":
        _give_kernel("convolution")
        _give_kernel("convolution_backward")
    else:
        library.impl("convolution_overrideable", _convolution, KEY)
        library.impl("convolution_backward_overrideable", _convolution_backward, KEY)


def in_a_new_thread(function):
    """Run a function where autograd is not switched off by the dispatcher; for kernels that differentiate."""
    outcome = {}

    def run():
        try:
            with torch._C.DisableTorchFunction():
                outcome["value"] = function()
        except Exception as error:
            outcome["error"] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that kernels of torch are replaced
    _start()
    import cuda_ops  # noqa: F401  # registers itself; some of these ops torch composes for the CPU alone
