"""Gradients that have shapes and no values: as torch does it where it gives an answer, else one of our errors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.masked import masked_tensor

import gradrein
from gradrein.errors import UnsupportedGradientError


def parameter(device="cpu"):
    p = torch.nn.Parameter(torch.ones(3, device=device))
    p.grad = torch.ones(3, device=device)
    return p


CALLS = {
    "clip_grad_norm_": lambda lib, ps: lib.clip_grad_norm_(ps, 1.0),
    "get_total_norm": lambda lib, ps: lib.get_total_norm([p.grad for p in ps]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors(call, inside):
    for lib in (gradrein, torch.nn.utils):
        mode = FakeTensorMode()
        with mode:
            p = parameter()
            found = call(lib, [p]) if inside else None
        found = call(lib, [p]) if found is None else found
        assert isinstance(found, FakeTensor)
        assert (found.shape, found.dtype, found.device.type) == ((), torch.float32, "cpu")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_values_where_every_result_is_fake(call):
    p = parameter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(call(gradrein, [p]), FakeTensor)


@pytest.mark.parametrize("devices", [("cpu", "meta"), ("meta", "cpu"), ("cpu", "cpu", "meta")], ids=str)
def test_only_some_without_values(devices):
    ps = [parameter(device) for device in devices]
    first = devices.index("meta")
    with pytest.raises(UnsupportedGradientError, match="on the meta device"):
        gradrein.clip_(ps, gradrein.by_norm(1.0))
    for call in CALLS.values():
        with pytest.raises(UnsupportedGradientError, match=f"1 of {len(ps)} gradients .* number {first} is the first"):
            call(gradrein, ps)
    assert all(p.grad.tolist() == [1, 1, 1] for p in ps if not p.grad.is_meta)


@pytest.mark.parametrize("nonfinite", ["raise", "propagate", "skip", "zero"])
def test_a_policy_needs_values(nonfinite):
    with FakeTensorMode():
        fake = parameter()
    for p in (fake, parameter("meta")):
        with pytest.raises(UnsupportedGradientError, match="a policy has nothing to decide by. Call clip_grad_norm_"):
            gradrein.clip_([p], gradrein.by_norm(1.0), nonfinite=nonfinite)


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_a_masked_tensor(foreach):
    masked = masked_tensor(torch.tensor([3.0, 4.0]), torch.tensor([True, False]))
    with pytest.raises(UnsupportedGradientError, match="is masked"):
        gradrein.get_total_norm([masked], foreach=foreach)
