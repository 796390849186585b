"""Llama 2, 3, 3.1, 3.2 and models of the same architecture (SmolLM2 among them)."""

from __future__ import annotations

from megarl.bridge import dense
from megarl.bridge.family import Family

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    rules=(
        dense.EMBEDDING,
        dense.ATTENTION_NORM,
        dense.QKV,
        dense.ATTENTION_OUT,
        dense.MLP_NORM,
        dense.GATE_UP,
        dense.DOWN,
        dense.FINAL_NORM,
        dense.HEAD,
    ),
    requires={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "rope_interleaved": (False, None),
        "attention_dropout": (0, None),
    },
    ignores=frozenset({"pretraining_tp", "is_llama_config"}),
    defaults={"num_key_value_heads": None, "head_dim": None},
)
