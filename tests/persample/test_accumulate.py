"""A gradient is added to whatever ``.grad`` holds, of all parameters or of none."""

import pytest
import torch
from torch import Tensor, nn

import gradrein


def _inference():
    with torch.inference_mode():
        return torch.ones(3)


BEFORE = {
    "plain": lambda: torch.ones(3),
    "expanded": lambda: torch.ones(1).expand(3),
    "overlapping": lambda: torch.ones(3).as_strided((3,), (0,)),
    "strided": lambda: torch.ones(3, 2)[:, 0],
    "sparse": lambda: torch.ones(3).to_sparse(),
    "negated": lambda: torch._neg_view(-torch.ones(3)),
    "inference": _inference,
}


def _model():
    torch.manual_seed(0)
    return nn.Linear(2, 3), torch.randn(4, 2)


def _step(model, x):
    gradrein.per_sample(model(x).sum(1), model).weighted_(torch.ones(4))


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_a_gradient_is_added_whatever_was_there(before):
    model, x = _model()
    model.weight.grad, model.bias.grad = torch.zeros(3, 2), before()
    _step(model, x)
    torch.testing.assert_close(model.weight.grad, x.sum(0).expand(3, 2))
    assert model.bias.grad.tolist() == [5, 5, 5]


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_a_compiled_step_adds_it_once(before):
    model, x = _model()
    step = gradrein.compile(lambda: _step(model, x), model, backend="captured")
    for _ in range(3):
        model.weight.grad, model.bias.grad = torch.zeros(3, 2), before()
        step()
        torch.testing.assert_close(model.weight.grad, x.sum(0).expand(3, 2))
        assert model.bias.grad.tolist() == [5, 5, 5]


def test_windows_over_one_another_are_not_added_to_twice():
    model, x = nn.Linear(3, 3), torch.randn(4, 3)
    before = torch.ones(5).as_strided((3, 3), (1, 1))
    model.weight.grad = before
    _step(model, x)
    torch.testing.assert_close(model.weight.grad, 1 + x.sum(0).expand(3, 3))
    assert before.eq(1).all()


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch has no `grad_dtype`")
def test_a_gradient_has_the_type_its_parameter_asks_for():
    model, x = _model()
    model.bfloat16()
    model.bias.grad_dtype = torch.float32
    _step(model, x.bfloat16())
    assert (model.bias.grad.dtype, model.bias.grad.tolist()) == (torch.float32, [4, 4, 4])
    assert model.weight.grad.dtype == torch.bfloat16
