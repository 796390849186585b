"""What Gemma 2 and 3 share: norms around attention and MLP whose weights are centred on zero, scaled embeddings, GELU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.bridge import dense
from megarl.bridge.dense import HF
from megarl.bridge.family import Config
from megarl.bridge.fields import number
from megarl.errors import UserError

RULES = (
    dense.EMBEDDING,
    dense.ATTENTION_NORM,
    dense.QKV,
    dense.ATTENTION_OUT,
    replace(dense.MLP_NORM, hf={f"{HF}pre_feedforward_layernorm.weight": "hidden"}),
    dense.GATE_UP,
    dense.DOWN,
    *dense.post_norms("post_attention_layernorm", "post_feedforward_layernorm"),
    dense.FINAL_NORM,
    dense.HEAD,
)
TRANSFORMER: Mapping[str, Any] = {
    "layernorm_zero_centered_gamma": True,  # norms multiply by 1 + weight, in the checkpoint as in Megatron
    "activation": "gelu_tanh",
    "post_norms": True,
}
REQUIRES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu_pytorch_tanh", None),
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "attention_bias": (False, None),
    "attention_dropout": (0, None),
    "use_bidirectional_attention": (False, None),
}
READS = frozenset({"query_pre_attn_scalar", "sliding_window", "layer_types"})
# How transformers keeps keys and values while it generates.
IGNORES = frozenset({"cache_implementation"})
DEFAULTS: Mapping[str, Any] = {"head_dim": 256, "tie_word_embeddings": True}


def scales(config: Config, default: float = 256) -> dict[str, Any]:
    """Of embeddings, by the square root of their size, and of attention scores, by a number of config.json's."""
    scalar = number(config, "query_pre_attn_scalar", default)
    if scalar is None:
        raise UserError("config.json: query_pre_attn_scalar = None must be a number above 0.")
    return {"embedding_scale": math.sqrt(config["hidden_size"]), "softmax_scale": scalar**-0.5}
