"""Public model families at an ordinary size: a per-sample clipped step over a plain one.

    python benchmarks/families.py [name ...]     # all, or these anew, in results/families.json

Models of `transformers` with hidden size 256 and four layers, batch 8 x 128 tokens (ViT: 64 patches), two threads. A
step is forward, backward and, clipped, `per_sample(losses, model).clip_(1.0)` in place of `losses.sum().backward()`.
Both take turns, on a machine that does nothing else.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

import gradrein
import side_by_side

BATCH, LENGTH, WORDS = 8, 128, 1000
WIDE: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 4, "pad_token_id": 0,
}  # fmt: skip
DECODER = WIDE | {"num_key_value_heads": 4}
EXPERTS = DECODER | {"num_experts_per_tok": 2, "output_router_logits": False}


def causal(model: Any, ids: Tensor) -> Tensor:
    out = model(input_ids=ids, use_cache=False).logits if "Mamba" not in type(model).__name__ else model(ids).logits
    return cross_entropy(out.transpose(1, 2), ids, reduction="none").mean(1)


def masked(model: Any, ids: Tensor) -> Tensor:
    return cross_entropy(model(input_ids=ids).logits.transpose(1, 2), ids, reduction="none").mean(1)


def translated(model: Any, ids: Tensor) -> Tensor:
    out = model(input_ids=ids, decoder_input_ids=ids).logits
    return cross_entropy(out.transpose(1, 2), ids, reduction="none").mean(1)


def seen(model: Any, pixels: Tensor) -> Tensor:
    return cross_entropy(model(pixel_values=pixels).logits, torch.arange(BATCH) % 10, reduction="none")


Loss = Callable[[Any, Tensor], Tensor]
FAMILIES: dict[str, tuple[str, str, Loss, dict[str, Any]]] = {
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", causal, {"vocab_size": WORDS, "n_embd": 256, "n_layer": 4, "n_head": 4}),
    "BERT": ("BertConfig", "BertForMaskedLM", masked, WIDE),
    "Llama": ("LlamaConfig", "LlamaForCausalLM", causal, DECODER),
    "Mamba": ("MambaConfig", "MambaForCausalLM", causal, WIDE | {"intermediate_size": 512, "use_mambapy": False}),
    "T5": (
        "T5Config", "T5ForConditionalGeneration", translated,
        {"vocab_size": WORDS, "d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4},
    ),
    "ViT": (
        "ViTConfig", "ViTForImageClassification", seen,
        WIDE | {"image_size": 64, "patch_size": 8, "num_labels": 10},
    ),
    "Falcon": ("FalconConfig", "FalconForCausalLM", causal, WIDE | {"ffn_hidden_size": 1024}),
    "Bloom": (
        "BloomConfig", "BloomForCausalLM", causal,
        {"vocab_size": WORDS, "hidden_size": 256, "n_layer": 4, "n_head": 4},
    ),
    "Qwen3-MoE": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", causal,
        EXPERTS | {"num_experts": 8, "moe_intermediate_size": 256, "head_dim": 64},
    ),
    "Mixtral": (
        "MixtralConfig", "MixtralForCausalLM", causal, EXPERTS | {"num_local_experts": 8, "intermediate_size": 512},
    ),
    "Longformer": (
        "LongformerConfig", "LongformerForMaskedLM", masked,
        WIDE | {"attention_window": 32, "max_position_embeddings": LENGTH + 2},
    ),
}  # fmt: skip


def steps(family: str) -> dict[str, Callable[[], None]]:
    config, head, loss, options = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, head)(getattr(transformers, config)(**options)).train(False)

    def batch() -> Tensor:  # another at each step: experts then get other tokens
        return torch.randn(BATCH, 3, 64, 64) if loss is seen else torch.randint(1, WORDS, (BATCH, LENGTH))

    def plain() -> None:
        model.zero_grad()
        loss(model, batch()).sum().backward()

    def clipped() -> None:
        model.zero_grad()
        gradrein.per_sample(loss(model, batch()), model).clip_(1.0)

    return {"plain": plain, "clipped": clipped}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    path = side_by_side.RESULTS / "families.json"
    known = {row["family"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    for family in sys.argv[1:] or FAMILIES:
        rounds = 3 if family == "Mamba" else 9  # without its kernels Mamba is a loop over tokens
        times = side_by_side.interleave(steps(family), rounds=rounds, warmup=1, inner=1)
        ratio = side_by_side.ratio(times["clipped"], times["plain"])
        print(f"{family:<12}{side_by_side.show(ratio)}  plain {1000 * min(times['plain']):.0f} ms", flush=True)
        known[family] = {"family": family, "clipped over plain": ratio}
        side_by_side.save("families", __doc__ or "", [known[name] for name in FAMILIES if name in known])


if __name__ == "__main__":
    main()
