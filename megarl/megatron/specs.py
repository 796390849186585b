"""Layer spec from one function: Transformer Engine where CUDA and it are there, else the local modules."""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megarl.cpu.layers import LocalCoreAttention, LocalNorm
from megarl.megatron.experts import BalancingRouter, BiasedExpertOut, RoutedLayer
from megarl.megatron.latent import LocalMLASelfAttention
from megarl.megatron.layer import PolicyLayer
from megarl.megatron.limits import uses_transformer_engine


def block_spec(config: TransformerConfig, virtual: int | None = None) -> TransformerBlockSubmodules:
    """Submodules of this pipeline stage's transformer block; of its `virtual` stage where it has several."""
    block = get_gpt_decoder_block_spec(
        config, uses_transformer_engine(), normalization=config.normalization, vp_stage=virtual
    )
    local = not uses_transformer_engine()
    norm = LocalNorm if local else block.layer_norm
    for layer in block.layer_specs:  # as few objects as there are kinds of layers: one may come several times
        layer.module, layer.params = PolicyLayer, {"post_norm": norm}
        if layer.submodules.mlp.module is MoELayer:
            layer.module = RoutedLayer
            layer.submodules.mlp.submodules.router = BalancingRouter
            if local and config.add_bias_linear:
                layer.submodules.mlp.submodules.experts.submodules.linear_fc2 = BiasedExpertOut
        if local:
            _localise(config, layer.submodules)
    block.layer_norm = norm
    return block


def _localise(config: TransformerConfig, layer: TransformerLayerSubmodules) -> None:
    """Our modules in the place of Megatron's local ones."""
    layer.input_layernorm = layer.pre_mlp_layernorm = LocalNorm
    attention = layer.self_attention
    parts = attention.submodules
    layer.sharded_state_dict_keys_map = _fused_names(config, layer)
    parts.core_attention = LocalCoreAttention
    if config.multi_latent_attention:
        attention.module = LocalMLASelfAttention
        parts.q_layernorm = parts.kv_layernorm = LocalNorm
    elif config.qk_layernorm:
        parts.q_layernorm = parts.k_layernorm = LocalNorm


def _fused_names(config: TransformerConfig, layer: TransformerLayerSubmodules) -> dict[str, str]:
    """Norms that Transformer Engine fuses with the layer after them have its names in checkpoints, so that models of both specs read
    the same. (Megatron's own map is not made for experts and for latent attention.)"""
    names = {}
    if config.multi_latent_attention:
        for latent in ("q", "kv"):
            names[f"self_attention.{latent}_layernorm."] = f"self_attention.linear_{latent}_up_proj.layer_norm_"
    else:
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if layer.mlp.module is not MoELayer:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return names
