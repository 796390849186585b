"""DeepSeek-V3 and R1 (arXiv:2412.19437): latent attention, experts chosen by biased sigmoid scores within the best groups.

The layer for multi-token prediction is no part of the model that is trained: a config that has one is refused.
"""

from __future__ import annotations

from typing import Any

from megarl.bridge import dense, mla, moe
from megarl.bridge.family import Config, Family
from megarl.errors import UserError


def _routing(config: Config) -> dict[str, Any]:
    """k experts by score + bias, out of the `topk_group` groups whose two best sum highest; weights are the scores, divided by
    their sum and scaled."""
    count = moe.chosen(config, "n_routed_experts")
    groups, best = config.get("n_group") or 1, config.get("topk_group") or 1
    if count == 1:
        raise UserError("config.json: num_experts_per_tok = 1 gives the router no gradient: not supported.")
    arguments = {
        "moe_router_topk": count,
        "moe_router_topk_scaling_factor": float(config.get("routed_scaling_factor") or 1.0),
    }
    if best < groups:
        # Megatron rates a group by its k // topk_group best, transformers by its two best.
        if count // best != 2:
            raise UserError(
                f"config.json: num_experts_per_tok = {count} with topk_group = {best} is not supported: "
                f"Megatron would rate a group by its {count // best} best experts, the model by its two best."
            )
        if config["n_routed_experts"] % groups or config["n_routed_experts"] < 2 * groups:
            raise UserError(
                f"config.json: n_group = {groups} must cut {config['n_routed_experts']} experts into equal groups of 2 or more."
            )
        arguments |= {"moe_router_num_groups": groups, "moe_router_group_topk": best}
    return arguments


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
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,  # the scores are taken before the choice
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # the bias stays what the checkpoint says
    },
    sizes=mla.SIZES,
    reads=mla.READS | {"n_group", "topk_group", "routed_scaling_factor"},
    derive=mla.derive,
    settings=_routing,
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
