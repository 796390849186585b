"""GLM-4, dense, and its predecessor of the same name that transformers calls Glm: half of each head turned by position in pairs of
neighbours, gate and up in one tensor, and in GLM-4 norms behind attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.bridge import dense
from megarl.bridge.family import Config, Family, with_part


def _parts(config: Config, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {"parts": frozenset({"bias"} if config.get("attention_bias", True) else ())}


def _settings(config: Config) -> dict[str, Any]:
    return {"add_qkv_bias": bool(config.get("attention_bias", True))}


GLM = Family(
    architecture="GlmForCausalLM",
    model_type="glm",
    rules=(
        dense.EMBEDDING,
        dense.ATTENTION_NORM,
        dense.QKV,
        replace(dense.QKV_BIAS, layers=with_part("bias")),
        dense.ATTENTION_OUT,
        dense.MLP_NORM,
        dense.FUSED_GATE_UP,
        dense.DOWN,
        dense.FINAL_NORM,
        dense.HEAD,
    ),
    transformer={"rotary_interleaved": True},
    reads=frozenset({"attention_bias", "partial_rotary_factor"}),
    derive=_parts,
    settings=_settings,
    requires={"hidden_act": ("silu",), "attention_dropout": (0, None)},
    defaults={"head_dim": 128, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07},
)
GLM4 = replace(
    GLM,
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    rules=(*GLM.rules, *dense.post_norms("post_self_attn_layernorm", "post_mlp_layernorm")),
    transformer={**GLM.transformer, "post_norms": True},
)
