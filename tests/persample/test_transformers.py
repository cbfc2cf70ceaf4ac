"""Unmodified Hugging Face models from tiny random configurations."""

import pytest
import torch
import torch.nn.functional as F

import gradrein

from .oracle import flat, loop

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

B, T, V = 3, 6, 19


def gpt2():
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=V, n_positions=8, n_embd=8, n_layer=2, n_head=2, **dropouts)
    )


SMALL = {"vocab_size": V, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}


def bert():
    config = transformers.BertConfig(
        **SMALL, max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.BertForMaskedLM(config)


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=1, max_position_embeddings=8)
    )


def t5():
    config = transformers.T5Config(
        vocab_size=V, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, dropout_rate=0.0
    )
    model = transformers.T5ForConditionalGeneration(config)
    forward = model.forward
    model.forward = lambda ids: forward(input_ids=ids, decoder_input_ids=ids)
    return model


def losses_of(model, ids):
    return F.cross_entropy(model(ids).logits.transpose(1, 2), ids, reduction="none").sum(1)


def check(ps, expected):
    found = ps.grads()
    assert list(found) == list(expected)
    torch.testing.assert_close(flat(found), flat(expected))
    torch.testing.assert_close(ps.norms(), flat(expected).norm(dim=1))
    ps.audit()


def parameters(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("build", [gpt2, bert, llama, t5])
@pytest.mark.parametrize("steps", [T, B])
@pytest.mark.filterwarnings("ignore")
def test_equals_the_loop(build, steps):
    model = build().double().train()
    ids = torch.randint(V, (B, steps))
    for _ in range(2):
        losses = losses_of(model, ids)
        check(gradrein.per_sample(losses, model), loop(losses, parameters(model)))


@pytest.mark.parametrize("build", [gpt2, bert, llama, t5])
@pytest.mark.filterwarnings("ignore")
def test_gradient_checkpointing(build):
    """With dropout: a checkpoint gives a region the random numbers it had."""
    model = build().double().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    ids = torch.randint(V, (B, T))

    def losses(use_reentrant):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        torch.manual_seed(5)
        return losses_of(model, ids)

    check(gradrein.per_sample(losses(False), model), loop(losses(False), parameters(model)))
    with pytest.raises(gradrein.errors.UnsupportedOperationError, match="gradient_checkpointing_kwargs"):
        gradrein.per_sample(losses(True), model)
