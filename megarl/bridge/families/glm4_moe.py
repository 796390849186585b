"""GLM-4.5 and 4.6: half of each head turned by position, norms on queries and keys in some sizes, DeepSeek-V3's router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.bridge import dense, moe
from megarl.bridge.family import Config, Family, with_part


def _layers(config: Config, sizes: Mapping[str, int]) -> dict[str, Any]:
    has = {"bias": config.get("attention_bias", False), "norms": config.get("use_qk_norm", False)}
    return {"parts": frozenset(name for name, there in has.items() if there), **moe.after_dense(config, sizes)}


def _settings(config: Config) -> dict[str, Any]:
    return {
        "add_qkv_bias": bool(config.get("attention_bias", False)),
        "qk_layernorm": bool(config.get("use_qk_norm", False)),
        **moe.biased_sigmoid(config),
    }


GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    rules=(
        dense.EMBEDDING,
        dense.ATTENTION_NORM,
        dense.QKV,
        replace(dense.QKV_BIAS, layers=with_part("bias")),
        replace(dense.Q_NORM, layers=with_part("norms")),
        replace(dense.K_NORM, layers=with_part("norms")),
        dense.ATTENTION_OUT,
        moe.NORM,
        moe.ROUTER,
        moe.ROUTER_BIAS,
        moe.EXPERT_GATE_UP,
        moe.EXPERT_DOWN,
        moe.SHARED_GATE_UP,
        moe.SHARED_DOWN,
        *moe.DENSE_MLP,
        dense.FINAL_NORM,
        dense.HEAD,
    ),
    transformer=moe.BIASED_SIGMOID,
    sizes={"experts": ("n_routed_experts",), "expert_ffn": ("moe_intermediate_size",)},
    reads=frozenset(
        {
            *("attention_bias", "use_qk_norm", "partial_rotary_factor"),
            *("first_k_dense_replace", "n_shared_experts", "num_experts_per_tok"),
            *("n_group", "topk_group", "routed_scaling_factor"),
        }
    ),
    derive=_layers,
    settings=_settings,
    mtp=True,
    requires={
        "hidden_act": ("silu",),
        "attention_dropout": (0, None),
        "norm_topk_prob": (True,),
    },
    ignores=frozenset({"output_router_logits"}),
    defaults={"head_dim": None, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
)
