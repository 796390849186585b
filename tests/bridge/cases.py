"""Configurations that the bridge's tables are walked over, and the layouts that each of them allows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.bridge.layout import Cut
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
    "qwen3-moe": tiny_config("qwen3-moe"),
    "qwen3-moe-mixed": tiny_config("qwen3-moe", mlp_only_layers=[1]),
    "qwen3-moe-steps": tiny_config("qwen3-moe", decoder_sparse_step=2, mlp_only_layers=[], tie_word_embeddings=True),
    "mixtral": tiny_config("mixtral"),
    "deepseek": tiny_config("deepseek"),
    "deepseek-one-step": tiny_config("deepseek", q_lora_rank=None, first_k_dense_replace=3, n_shared_experts=1),
    "deepseek-v2": tiny_config("deepseek-v2"),
    "mistral": tiny_config("mistral"),
    "glm4-moe": tiny_config("glm4-moe"),
    "glm4-moe-plain": tiny_config("glm4-moe", attention_bias=False, use_qk_norm=False, n_shared_experts=1),
    "gpt-oss": tiny_config("gpt-oss"),
    "glm": tiny_config("glm", attention_bias=False),
    "glm4": tiny_config("glm4"),
    "glm4-wide": tiny_config("glm4", **WIDE),
    "gemma2": tiny_config("gemma2"),
    "gemma2-untied": tiny_config("gemma2", tie_word_embeddings=False),
    "gemma3": tiny_config("gemma3"),
}


def _cuts(config: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Tensor, expert and expert tensor parallelism: every size of the first, each of the others with some of the first."""
    model = ModelMap.from_hf(config)
    sizes = [(tp, 1, 1) for tp in (1, 2, 3, 4, 8)]
    if model.has_experts:
        sizes += [(1, 2, 1), (2, 2, 2), (1, 2, 2), (2, model.dims.experts, 1), (2, 1, 2)]
    return [(tp, ep, etp) for tp, ep, etp in sizes if not model.check_layout(tp, 1, ep, etp)]


# Variants that differ little from another one: left to the long form of the tests.
_SLOW = ("glm", "glm4-wide", "glm4-moe-plain", "gemma2-untied")
# What a checkpoint is cut into: the sizes of the three axes that cut tensors.
LAYOUTS = [
    pytest.param(
        name,
        Cut(tensor_size=tp, expert_size=ep, expert_tensor_size=etp),
        id=f"{name}-tp{tp}-ep{ep}-etp{etp}",
        marks=pytest.mark.slow if name in _SLOW else (),
    )
    for name, config in CONFIGS.items()
    for tp, ep, etp in _cuts(config)
]


def ranks(sizes: Cut) -> list[Cut]:
    """Every place there is: each rank of tensor parallelism with each of the experts' two axes."""
    return [
        replace(sizes, tensor=tensor, expert=expert, expert_tensor=part)
        for tensor in range(sizes.tensor_size)
        for expert in range(sizes.expert_size)
        for part in range(sizes.expert_tensor_size)
    ]


def numbered(model: ModelMap) -> dict[str, Tensor]:
    """A checkpoint in which no two elements are equal, so that every misplaced one shows."""
    checkpoint, start = {}, 0
    for name, shape in model.hf_shapes.items():
        size = torch.Size(shape).numel()
        checkpoint[name] = torch.arange(start, start + size).view(shape)
        start += size
    return checkpoint


def one_by_one(tensors: dict[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """What `transformers` writes: a layer's experts, which it holds fused, under names of their own (but gpt-oss's); not what
    follows from the config, rotary frequencies and the scale of embeddings."""
    mixtral = model_type == "mixtral"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    result = {}
    for key, tensor in tensors.items():
        name = key.replace(".mlp.", ".block_sparse_moe.") if mixtral else key
        head, fused, kind = name.rpartition(".experts.")
        if "rotary_emb" in name or name.endswith("embed_scale"):
            continue
        if not fused or model_type == "gpt_oss":
            result[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = matrix.chunk(2) if kind == "gate_up_proj" else (matrix,)
            wanted = names[:2] if kind == "gate_up_proj" else names[2:]
            for part, matrix_name in zip(parts, wanted, strict=True):
                result[f"{head}.experts.{expert}.{matrix_name}.weight"] = part
    return result
