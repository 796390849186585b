"""What layers of some families do and Megatron's do not, and the configuration's fields for it.

Norms behind attention and MLP, before what they answer is added to the residual stream; and a rotary base of their own for layers
with a sliding window: the model hands down the angles of both bases side by side, and a layer takes its half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import is_layer_window_attention


@dataclass
class Additions:
    """What Megatron's configuration has no field for. At the defaults nothing is added."""

    post_norms: bool = False
    embedding_scale: float = 1.0  # embeddings are multiplied by it
    window_rotary_base: float | None = None  # of layers with a sliding window; None: that of all
    attention_softcap: float | None = None  # attention scores s become c · tanh(s / c)
    final_softcap: float | None = None  # logits likewise


@dataclass
class PolicyConfig(Additions, TransformerConfig):
    """The configuration of a model."""


@dataclass
class LatentPolicyConfig(Additions, MLATransformerConfig):
    """The configuration of a model with multi-head latent attention."""


class PolicyLayer(TransformerLayer):
    """A transformer layer with what its configuration adds. `post_norm`: the class of the norms."""

    def __init__(self, config: PolicyConfig, *args: Any, post_norm: Callable[..., torch.nn.Module], **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if config.post_norms:
            sizes = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
            self.post_self_attn_layernorm = post_norm(config=config, **sizes)
            self.post_mlp_layernorm = post_norm(config=config, **sizes)
            self.self_attn_bda = _normed(self.post_self_attn_layernorm, self.self_attn_bda)
            self.mlp_bda = _normed(self.post_mlp_layernorm, self.mlp_bda)
        self.windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)

    def forward(self, *args: Any, rotary_pos_emb: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if rotary_pos_emb is not None and self.config.window_rotary_base is not None:
            everywhere, windowed = rotary_pos_emb.chunk(2, dim=-1)
            rotary_pos_emb = windowed if self.windowed else everywhere
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)


def _normed(norm: torch.nn.Module, add: Callable) -> Callable:
    """Megatron's adding to the residual stream, with a norm of what is added."""

    def of(training: bool, fused: bool) -> Callable:
        adding = add(training, fused)

        def adding_normed(output_with_bias: tuple, residual: torch.Tensor, dropout: float) -> torch.Tensor:
            output, bias = output_with_bias
            return adding((norm(output if bias is None else output + bias), None), residual, dropout)

        return adding_normed

    return of
