"""Configurations that the bridge's tables are walked over, and the layouts that each of them allows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.bridge.model_map import ModelMap
from megarl.models.tiny import tiny_config

# Eight key-value heads, so that TP=4 and TP=8 are legal too; an odd vocabulary, so that all of them pad it.
WIDE: dict[str, Any] = {
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "hidden_size": 120,
    "intermediate_size": 72,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama"),
    "llama-tied": tiny_config("llama", tie_word_embeddings=True),
    "llama-mha": tiny_config("llama", num_key_value_heads=6),
    "llama-wide": tiny_config("llama", **WIDE),
    "qwen2": tiny_config("qwen2"),
    "qwen2-untied": tiny_config("qwen2-untied"),
    "qwen2-wide": tiny_config("qwen2-untied", **WIDE),
    "qwen3": tiny_config("qwen3"),
    "qwen3-untied": tiny_config("qwen3", tie_word_embeddings=False),
    "qwen3-wide": tiny_config("qwen3", **WIDE),
}
LAYOUTS = [
    (name, tp)
    for name, config in CONFIGS.items()
    for tp in (1, 2, 3, 4, 8)
    if not ModelMap.from_hf(config).check_layout(tp, 1)
]


def numbered(model: ModelMap) -> dict[str, Tensor]:
    """A checkpoint in which no two elements are equal, so that every misplaced one shows."""
    checkpoint, start = {}, 0
    for name, shape in model.hf_shapes.items():
        size = torch.Size(shape).numel()
        checkpoint[name] = torch.arange(start, start + size).view(shape)
        start += size
    return checkpoint
