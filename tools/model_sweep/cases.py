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
    "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "intermediate_size": 48, "ffn_dim": 48, "d_ff": 48,
    "n_inner": 48,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "ffn_hidden_size": 48, "dim_feedforward": 48,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "max_position_embeddings": 64, "n_positions": 64,
    "image_size": IMAGE, "patch_size": 8, "num_channels": 3, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "state_size": 8, "num_labels": 5, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "projection_dim": 32, "num_mel_bins": 16,
    "max_source_positions": 32, "max_target_positions": 32, "num_codebooks": 2, "layers": 2, "attention_window": 4,
    "use_cache": False, "out_hidden_size": 32, "depth": 2, "sliding_window": 4,
}  # fmt: skip
# Sizes that must fit each other differ between families: if all of SMALL does not build, try fewer.
SHORT = {name: size for name, size in SMALL.items() if "head_dim" not in name}
SHALLOW = {
    name: size
    for name, size in SMALL.items()
    if "layer" in name or "token" in name or name in ("vocab_size", "depth", "image_size")
}


@dataclass
class Case:
    """One class with one small configuration."""

    type: str
    name: str
    model: nn.Module | None = None
    images: bool = False
    failure: dict[str, object] = field(default_factory=dict)

    def losses(self, batch: int) -> torch.Tensor:
        """One loss per sample: a fixed random functional of every output that has a row per sample."""
        assert self.model is not None
        torch.manual_seed(100 + batch)
        outputs = self.model(**inputs_of(self.model, self.images))
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
    """Every tensor of a nest."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)


def ids() -> torch.Tensor:
    """Tokens that end as a text does."""
    made = torch.randint(3, 99, (BATCH, LENGTH))
    made[:, -1] = 2  # classifiers look for the end of the text
    return made


def inputs_of(model: nn.Module, images: bool) -> dict[str, torch.Tensor]:
    """Random inputs of the kind this model says it takes."""
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
    if main == "pixel_values" or ("pixel_values" in accepted and (images or "input_ids" not in accepted)):
        size = getattr(config, "image_size", IMAGE)
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        made["pixel_values"] = torch.randn(BATCH, getattr(config, "num_channels", 3), height, width, dtype=dtype)
    elif main == "input_features":
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 16)
        made["input_features"] = torch.randn(BATCH, bins, 64, dtype=dtype)
    elif main == "input_values":
        made["input_values"] = torch.randn(BATCH, 2000, dtype=dtype)
    return made


def shrink(config: object, sizes: dict[str, object]) -> None:
    """Cut the sizes that this configuration and its parts have."""
    for name, value in sizes.items():
        if getattr(config, name, None) is not None or name == "pad_token_id":
            with contextlib.suppress(Exception):
                setattr(config, name, value)
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if inner is not None:
            shrink(inner, sizes)
    layers = getattr(config, "num_hidden_layers", 2)
    for name in ("layer_types", "mlp_layer_types"):
        kinds = list(getattr(config, name, None) or ())
        if kinds:
            first = list(dict.fromkeys(kinds))[:layers]  # one layer of each kind
            with contextlib.suppress(Exception):
                setattr(config, name, first + kinds[: layers - len(first)])


def attempt(kind: str, cls: type, sizes: dict[str, object], images: bool) -> Case:
    """Build one version, and run it once."""
    config = AutoConfig.for_model(kind)
    shrink(config, sizes)
    with torch.device("meta"):  # default sizes may not fit into memory
        if sum(p.numel() for p in cls(config).parameters()) > 20_000_000:
            raise ValueError("still too large")
    torch.manual_seed(0)
    model = cls(config)
    case = Case(kind, cls.__name__, model.double().eval(), images)
    try:
        case.losses(0)
    except RuntimeError:  # kernels for experts know no float64
        case.model = model.float()
        case.losses(0)
    return case


def build(kind: str, cls: type) -> Case:
    """The first of several cut-down versions that transformers itself can run."""
    why = ""
    for sizes in (SMALL, SHORT, SHALLOW):
        for images in (False, True):
            try:
                return attempt(kind, cls, sizes, images)
            except TimeoutError:
                raise
            except Exception as error:
                why = why or f"{type(error).__name__}: {error}"[:200]
    return Case(kind, cls.__name__, failure={"outcome": "not built", "why": why})


def cases(kinds: list[str] | None, part: int, parts: int) -> Iterator[Case]:
    """One case for each class of each model type."""
    known = sorted(kinds or CONFIG_MAPPING.keys())
    for kind in known[part::parts]:
        for cls in classes_of(kind):
            yield build(kind, cls)


def classes_of(kind: str) -> list[type]:
    """The classes that the tables of transformers list for a model type."""
    found: list[type] = []
    for table in TABLES:
        with contextlib.suppress(Exception):  # a family whose own dependencies are missing
            cls = getattr(modeling_auto, table).get(CONFIG_MAPPING[kind], None)
            found += cls if isinstance(cls, tuple) else (cls,) if cls else ()
    return list(dict.fromkeys(found))
