"""Small models of every model type that the installed transformers knows, with inputs for two batches."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

BATCH, LENGTH, IMAGE = 3, 6, 32
TABLES = (
    "MODEL_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
)
# Only set where the configuration has the attribute.
SMALL = {
    "vocab_size": 99, "hidden_size": 32, "d_model": 32, "n_embd": 32, "embed_dim": 32, "dim": 32, "embedding_size": 32,
    "emb_dim": 32, "n_embed": 32, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2, "num_attention_heads": 4,
    "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "intermediate_size": 48, "ffn_dim": 48, "d_ff": 48, "n_inner": 48,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "ffn_hidden_size": 48, "dim_feedforward": 48, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "max_position_embeddings": 64, "n_positions": 64,
    "image_size": IMAGE, "patch_size": 8, "num_channels": 3, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "state_size": 8, "num_labels": 5, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "projection_dim": 32, "num_mel_bins": 16,
    "max_source_positions": 32, "max_target_positions": 32, "num_codebooks": 2, "layers": 2, "attention_window": 4,
    "use_cache": False, "out_hidden_size": 32, "depth": 2, "sliding_window": 4,
}  # fmt: skip


@dataclass
class Case:
    """One class with one small configuration."""

    type: str
    name: str
    model: nn.Module | None = None
    failure: dict[str, object] = field(default_factory=dict)

    def losses(self, batch: int) -> torch.Tensor:
        """One loss per sample: a fixed random functional of every output that has a row per sample."""
        assert self.model is not None
        torch.manual_seed(100 + batch)
        outputs = self.model(**inputs_of(self.model))
        generator = torch.Generator().manual_seed(7)
        found = [t for t in tensors_in(outputs) if t.requires_grad and t.dim() > 0 and len(t) == BATCH]
        parts = []
        for tensor in found:
            weight = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            parts.append((tensor.nan_to_num(0, 0, 0) * weight).flatten(1).sum(1).to(torch.float64))
        if not parts:
            raise ValueError("no output has one row per sample and needs a gradient")
        return torch.stack(parts).sum(0)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)


def ids() -> torch.Tensor:
    made = torch.randint(3, 99, (BATCH, LENGTH))
    made[:, -1] = 2  # classifiers look for the end of the text
    return made


def inputs_of(model: nn.Module) -> dict[str, torch.Tensor]:
    config, accepted = model.config, inspect.signature(model.forward).parameters
    dtype = next(model.parameters()).dtype
    made: dict[str, torch.Tensor] = {}
    if "input_ids" in accepted:
        made["input_ids"] = ids()
        if "attention_mask" in accepted:
            made["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if "decoder_input_ids" in accepted and getattr(config, "is_encoder_decoder", False):
        made["decoder_input_ids"] = ids()
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values" or ("pixel_values" in accepted and "input_ids" not in accepted):
        size = getattr(config, "image_size", IMAGE)
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        made["pixel_values"] = torch.randn(BATCH, getattr(config, "num_channels", 3), height, width, dtype=dtype)
    elif main == "input_features":
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 16)
        made["input_features"] = torch.randn(BATCH, bins, 64, dtype=dtype)
    elif main == "input_values":
        made["input_values"] = torch.randn(BATCH, 2000, dtype=dtype)
    return made


def shrink(config: object) -> None:
    for name, value in SMALL.items():
        if getattr(config, name, None) is not None or name == "pad_token_id":
            with contextlib.suppress(Exception):
                setattr(config, name, value)
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if inner is not None:
            shrink(inner)
    layers = getattr(config, "num_hidden_layers", 2)
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if kinds:
            with contextlib.suppress(Exception):
                setattr(config, name, list(dict.fromkeys(kinds))[:layers] + list(kinds)[: max(0, layers - len(set(kinds)))])


def small_config(kind: str) -> object:
    config = AutoConfig.for_model(kind)
    shrink(config)
    config._attn_implementation = "eager" if len(kind) % 2 else "sdpa"
    return config


def build(kind: str, cls: type) -> Case:
    torch.manual_seed(0)
    try:
        model = cls(small_config(kind))
        if sum(p.numel() for p in model.parameters()) > 3_000_000:
            return Case(kind, cls.__name__, failure={"outcome": "not built", "why": "still too large"})
        case = Case(kind, cls.__name__, model.double().eval())
        try:
            case.losses(0)
        except RuntimeError:  # kernels for experts know no float64
            case.model = model.float()
        return case
    except Exception as error:
        return Case(kind, cls.__name__, failure={"outcome": "not built", "why": f"{type(error).__name__}: {error}"[:200]})


def cases(kinds: list[str] | None, part: int, parts: int) -> Iterator[Case]:
    known = sorted(kinds or CONFIG_MAPPING.keys())
    for kind in known[part::parts]:
        try:
            config_class = CONFIG_MAPPING[kind]
        except Exception:
            continue
        seen: set[type] = set()
        for table in TABLES:
            try:
                cls = getattr(modeling_auto, table).get(config_class, None)
            except Exception:
                continue
            for one in cls if isinstance(cls, tuple) else (cls,) if cls else ():
                if one not in seen:
                    seen.add(one)
                    yield build(kind, one)
