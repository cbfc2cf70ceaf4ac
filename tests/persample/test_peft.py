"""Adapters of peft on unmodified models: gradients of the adapters alone, exact, whatever peft does in its forward pass."""

import pytest
import torch
import torch.nn.functional as F

import gradrein

from .oracle import flat, loop

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

TARGETS = ["c_attn", "c_proj"]
ADAPTERS = {
    "LoRA": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, fan_in_fan_out=True),
    "LoRA of embeddings": lambda: peft.LoraConfig(r=2, target_modules=["wte", "c_attn"], fan_in_fan_out=True),
    "DoRA": lambda: peft.LoraConfig(r=2, target_modules=TARGETS, fan_in_fan_out=True, use_dora=True),
    "IA3": lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["c_proj"], fan_in_fan_out=True),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def adapted(adapter):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=13, n_positions=16, n_embd=8, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), ADAPTERS[adapter]())
    with torch.no_grad():
        for p in model.parameters():  # some adapters begin as zeros, of which gradients are zero too
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return model.double()


def losses_of(model, ids):
    logits = model(input_ids=ids).logits[:, -ids.shape[1] :]
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_equals_the_loop(adapter):
    model, ids = adapted(adapter), torch.randint(13, (3, 6))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert 0 < len(trained) < len(list(model.parameters()))
    ps = gradrein.per_sample(losses_of(model, ids), model)
    expected = loop(losses_of(model, ids), trained)
    assert ps.grads().keys() == trained.keys()
    for name, gradient in ps.grads().items():
        torch.testing.assert_close(gradient, expected[name])
    torch.testing.assert_close(ps.norms(), flat(expected).norm(dim=1))
    assert ps.audit().unused == ()
    ps.clip_(0.1)
    factors = (0.1 / flat(expected).norm(dim=1)).clamp(max=1)
    for name, p in trained.items():
        torch.testing.assert_close(p.grad, (factors.view(-1, *[1] * p.dim()) * expected[name]).mean(0))
