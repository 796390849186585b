"""Qwen2 and Qwen2.5, dense: Llama's layers with biases on q, k and v."""

from __future__ import annotations

from megarl.bridge import dense
from megarl.bridge.family import Family

QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    rules=(
        dense.EMBEDDING,
        dense.ATTENTION_NORM,
        dense.QKV,
        dense.QKV_BIAS,
        dense.ATTENTION_OUT,
        dense.MLP_NORM,
        dense.GATE_UP,
        dense.DOWN,
        dense.FINAL_NORM,
        dense.HEAD,
    ),
    transformer={"add_qkv_bias": True},
    requires={
        "hidden_act": ("silu",),
        "use_sliding_window": (False, None),
        "layer_types": ("full_attention",),
        "use_mrope": (False, None),
        "attention_dropout": (0, None),
    },
    # The sliding window's own fields count only where use_sliding_window is on, which is refused.
    ignores=frozenset({"sliding_window", "max_window_layers"}),
    defaults={"head_dim": None},
)
