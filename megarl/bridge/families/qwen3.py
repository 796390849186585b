"""Qwen3, dense: an RMSNorm on every head's query and key, a head size of its own, no biases."""

from __future__ import annotations

from megarl.bridge import dense
from megarl.bridge.family import Family

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    rules=(
        dense.EMBEDDING,
        dense.ATTENTION_NORM,
        dense.QKV,
        dense.Q_NORM,
        dense.K_NORM,
        dense.ATTENTION_OUT,
        dense.MLP_NORM,
        dense.GATE_UP,
        dense.DOWN,
        dense.FINAL_NORM,
        dense.HEAD,
    ),
    transformer={"qk_layernorm": True},
    requires={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False, None),
        "layer_types": ("full_attention",),
        "attention_dropout": (0, None),
    },
    # The sliding window's own fields count only where use_sliding_window is on, which is refused.
    ignores=frozenset({"sliding_window", "max_window_layers"}),
    defaults={"head_dim": 128},
)
