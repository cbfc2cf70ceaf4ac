"""Policies work on the device of the gradients, whatever torch's default device is."""

import pytest
import torch
from cases import ALL

import gradrein

FIXED = {
    "by_norm": lambda: gradrein.by_norm(1.0),
    "by_norm, each": lambda: gradrein.by_norm(1.0, per_parameter=True),
    "by_rms": lambda: gradrein.by_rms(0.1),
    "by_unit": gradrein.by_unit,
    "by_value": lambda: gradrein.by_value(0.1),
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("make", [*FIXED.values(), *ALL.values()], ids=[*FIXED, *ALL])
def test_the_default_device_does_not_matter(make, native, request):
    if not native:
        request.getfixturevalue("without_kernels")
    found = []
    for default in ("cpu", "meta"):
        ps = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in (("a", 3), ("b", (2, 2)))}
        grads = [torch.randn(4, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        policy, after = make(), []
        with torch.device(default):
            for g in grads:
                ps["a"].grad, ps["b"].grad = g[:3].clone(), g.view(2, 2).clone()
                report = gradrein.clip_(ps, policy)
                after += [ps["a"].grad, ps["b"].grad, report.norm_after]
            if hasattr(policy, "state_dict"):
                make().load_state_dict(policy.state_dict())
        found.append(after)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
