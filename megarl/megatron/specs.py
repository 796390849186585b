"""Layer spec from one function: Transformer Engine where CUDA and it are there, else the local modules."""

from __future__ import annotations

import importlib.util

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.cpu.layers import LocalCoreAttention, LocalNorm


def uses_transformer_engine() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules | object:
    """Submodules of this pipeline stage's transformer block."""
    if uses_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = LocalNorm
    attention = parts.self_attention.submodules
    attention.core_attention = LocalCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = LocalNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=LocalNorm)
