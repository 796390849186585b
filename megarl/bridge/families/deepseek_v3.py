"""DeepSeek-V3 and R1 (arXiv:2412.19437): latent attention, experts chosen by biased sigmoid scores within the best groups."""

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
    mtp=True,
    requires={
        **mla.REQUIRES,
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
        "norm_topk_prob": (True,),
        "rope_interleave": (True, None),
    },
    ignores=mla.IGNORES,
    defaults={"num_key_value_heads": None},
)
