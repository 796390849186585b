"""DeepSeek-V3 and R1 (arXiv:2412.19437): latent attention, experts chosen by biased sigmoid scores within the best groups.

The layer for multi-token prediction is no part of the model that is trained: a config that has one is refused.
"""

from __future__ import annotations

from megarl.bridge import dense, mla, moe
from megarl.bridge.family import Family

DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    rules=(
        dense.EMBEDDING,
        *mla.ATTENTION,
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
    transformer={
        "multi_latent_attention": True,
        "qk_layernorm": True,  # of the latents
        **moe.BIASED_SIGMOID,
    },
    sizes=mla.SIZES,
    reads=mla.READS | {"n_group", "topk_group", "routed_scaling_factor"},
    derive=mla.derive,
    settings=moe.biased_sigmoid,
    requires={
        **mla.REQUIRES,
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
        "norm_topk_prob": (True,),
        "rope_interleave": (True, None),
        "num_nextn_predict_layers": (0, None),
        "num_mtp_layers": (0, None),
    },
    ignores=mla.IGNORES,
    defaults={"num_key_value_heads": None},
)
