"""Our engine against torch's, bit for bit, over the sample inputs torch ships for its own ops."""

import warnings
from collections import Counter, defaultdict
from itertools import islice

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradrein import graph
from gradrein.autograd import replay

SAMPLES_PER_OP = 3
PARTS = 8  # each is a test of its own, with its own time limit


def same_bits(ours, torchs):
    if ours is None or torchs is None:
        return ours is torchs
    if ours.layout != torchs.layout:
        return False
    if ours.layout != torch.strided:
        ours, torchs = ours.to_dense(), torchs.to_dense()
    return ours.dtype == torchs.dtype and torch.equal(ours.nan_to_num(), torchs.nan_to_num())


def differentiable(value):
    tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.requires_grad]
    return [t for t in tensors if t.is_floating_point() or t.is_complex()]


def compare(op, sample):
    """Return the node kinds of one sample's graph, or raise SkipError with torch's own reason."""
    torch.manual_seed(0)
    inputs = differentiable((sample.input, sample.args, sample.kwargs))
    try:
        outputs = differentiable(op(sample.input, *sample.args, **sample.kwargs))
    except Exception as error:
        raise SkipError(f"torch cannot compute it: {type(error).__name__}") from None
    if not inputs or not outputs:
        raise SkipError("nothing to differentiate")
    strided = [output.layout == torch.strided for output in outputs]
    grads = [torch.randn_like(o) if easy else o.detach().clone() for o, easy in zip(outputs, strided, strict=True)]
    try:
        torch.manual_seed(1)
        expected = torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)
    except Exception as error:
        raise SkipError(f"torch cannot differentiate it: {type(error).__name__}") from None
    torch.manual_seed(1)
    found = replay(outputs, inputs, grads)
    assert all(map(same_bits, found, expected)), f"{op.name}: replay differs from torch"
    return {graph.op(node) for node in graph.read(outputs).nodes}


class SkipError(Exception):
    pass


def samples_of(op):
    dtypes = [d for d in (torch.float64, torch.complex128) if d in op.supported_backward_dtypes("cpu")]
    if not op.supports_autograd or not dtypes:
        raise SkipError("torch says it has no gradient in double precision on CPU")
    try:
        return list(islice(op.sample_inputs("cpu", dtypes[0], requires_grad=True), SAMPLES_PER_OP))
    except Exception as error:
        raise SkipError(f"torch's sample inputs fail: {type(error).__name__}") from None


# torch's own sample inputs warn about deprecated arguments, beta features and the like.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_op_of_torchs_database_bit_for_bit(part, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        op_db = pytest.importorskip("torch.testing._internal.common_methods_invocations").op_db
    compared, kinds, skips = Counter(), set(), defaultdict(list)
    for op in op_db[part::PARTS]:
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        try:
            for sample in samples_of(op):
                try:
                    kinds |= compare(op, sample)
                    compared[name] += 1
                except SkipError as skip:
                    skips[f"one sample: {skip}"].append(name)
        except SkipError as skip:
            skips[str(skip)].append(name)
    with capsys.disabled():
        print(f"\nreplay equals torch: {len(compared)} ops, {compared.total()} samples, {len(kinds)} node kinds")
        for reason, names in skips.items():
            print(f"  skipped, {reason} ({len(names)}): {', '.join(dict.fromkeys(names))}")
    assert len(compared) > 500 // PARTS
