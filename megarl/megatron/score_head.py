"""The head of a critic or a reward model: a linear layer from hidden states to scores, on the last pipeline stage.

Every tensor-parallel rank has it whole and computes the same with it. So its gradient is whole on each of them, and nothing is
to be summed over them: neither the head's own gradient nor the one that flows back into the hidden states.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.bridge.heads import Head
from megarl.megatron.parallel import device


class ScoreHead(MegatronModule):
    """(R, H) hidden states -> (R, K) scores, computed in float32 whatever the dtype of its weights."""

    def __init__(self, config: TransformerConfig, head: Head):
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.empty(head.labels, config.hidden_size, dtype=config.params_dtype))
        bias = torch.nn.Parameter(torch.empty(head.labels, dtype=config.params_dtype)) if head.bias else None
        self.register_parameter("bias", bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(rows.float(), self.weight.float(), bias)


def put_head(model: torch.nn.Module, config: TransformerConfig, head: Head) -> None:
    """In the place of the model's output layer, where this stage has one."""
    if model.post_process:
        model.output_layer = None
        model.score_head = ScoreHead(config, head).to(device())
