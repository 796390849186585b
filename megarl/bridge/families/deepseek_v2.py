"""DeepSeek-V2-Lite and its kin (arXiv:2405.04434): latent attention, experts chosen by softmax scores, which stay as they are.

V2 itself rates groups of experts by their best one, which Megatron cannot: `topk_method` other than greedy is refused.
"""

from __future__ import annotations

from typing import Any

from megarl.bridge import dense, mla, moe
from megarl.bridge.family import Config, Family
from megarl.bridge.fields import number


def _routing(config: Config) -> dict[str, Any]:
    return {
        "moe_router_topk": moe.chosen(config),
        "moe_router_topk_scaling_factor": float(number(config, "routed_scaling_factor", None) or 1.0),
    }


DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    rules=(
        dense.EMBEDDING,
        *mla.ATTENTION,
        moe.NORM,
        moe.ROUTER,
        moe.EXPERT_GATE_UP,
        moe.EXPERT_DOWN,
        moe.SHARED_GATE_UP,
        moe.SHARED_DOWN,
        *moe.DENSE_MLP,
        dense.FINAL_NORM,
        dense.HEAD,
    ),
    transformer={
        "multi_latent_attention": True,
        "qk_layernorm": True,  # of the latents
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
    },
    sizes=mla.SIZES,
    reads=mla.READS | {"routed_scaling_factor"},
    derive=mla.derive,
    settings=_routing,
    requires={
        **mla.REQUIRES,
        "mlp_bias": (False, None),
        "scoring_func": ("softmax", None),
        "topk_method": ("greedy", None),
        "norm_topk_prob": (False, None),
    },
    # The groups count only under another topk_method, which is refused.
    ignores=mla.IGNORES | {"n_group", "topk_group"},
    defaults={"num_key_value_heads": None},
)
