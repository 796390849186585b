"""Multi-head latent attention on Megatron's local spec: what Transformer Engine's modules do, in plain torch.

Two things of Megatron's local spec are replaced. The projections down to the latents are on every tensor-parallel rank: cut by
column, as the local spec has them, the gradient of the key's positional part, which all heads share, would be that of a rank's
own heads only. And rotary angles go by the row's position, since the rows of a packed row may start anywhere (shared prompts).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig


class LocalMLASelfAttention(MLASelfAttention):
    """MLASelfAttention with replicated projections down and rotary angles by position."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = Replicated(config, config.hidden_size, config.q_lora_rank)
        latent = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = Replicated(config, config.hidden_size, latent)
        self.rotary_pos_emb = ByPosition(self.rotary_pos_emb)

    def get_query_key_value_tensors(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        # Megatron hands the row's description on by position.
        params = packed_seq_params if packed_seq_params is not None else args[3]
        self.rotary_pos_emb.positions = params.positions
        if packed_seq_params is not None:
            kwargs["packed_seq_params"] = packed_seq_params
        return super().get_query_key_value_tensors(*args, **kwargs)


class Replicated(MegatronModule):
    """A linear layer that every tensor-parallel rank has whole. With sequence parallelism each sees its tokens only, so its
    gradient is marked to be summed over them."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int):
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None


class ByPosition(torch.nn.Module):
    """A rotary embedding of Megatron whose angles are picked by `positions` (T,), row by row of what is asked for."""

    def __init__(self, rotary: torch.nn.Module):
        super().__init__()
        self.rotary = rotary
        self.positions: torch.Tensor | None = None

    def get_rotary_seq_len(self, *args: Any) -> int:
        return self.rotary.get_rotary_seq_len(*args)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """(T, 1, 1, D) angles, and YaRN's factor where the rotary embedding has one."""
        answer = self.rotary(*args, **kwargs)
        angles, *rest = answer if isinstance(answer, tuple) else (answer,)
        if self.positions is not None:
            angles = angles.index_select(0, self.positions)
        return (angles, *rest) if rest else angles
