"""Qwen3 with experts: Qwen3's attention, a router with a softmax over the experts, no shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.bridge import dense, moe
from megarl.bridge.family import Config, Family
from megarl.bridge.fields import short
from megarl.errors import UserError


def _layers(config: Config, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Every `decoder_sparse_step`th layer has experts, but for those of `mlp_only_layers`."""
    step, plain = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers")
    plain = [] if plain is None else plain
    if not isinstance(plain, list) or not all(type(layer) is int for layer in plain):
        raise UserError(f"config.json: mlp_only_layers = {short(plain)} must be a list of layer numbers.")
    pattern = ((layer + 1) % step == 0 and layer not in plain for layer in range(sizes["layers"]))
    return moe.some_sparse(pattern, "decoder_sparse_step and mlp_only_layers")


def _routing(config: Config) -> dict[str, Any]:
    """Softmax over all experts, the largest k of it: as they are, or divided by their sum, which is a softmax over the k."""
    count = moe.chosen(config)
    normalised = bool(config.get("norm_topk_prob", False))
    if normalised and count == 1:
        raise UserError(
            "config.json: norm_topk_prob with num_experts_per_tok = 1 gives the router no gradient: not supported."
        )
    return {"moe_router_topk": count, "moe_router_pre_softmax": not normalised}


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    rules=(
        dense.EMBEDDING,
        dense.ATTENTION_NORM,
        dense.QKV,
        dense.Q_NORM,
        dense.K_NORM,
        dense.ATTENTION_OUT,
        moe.NORM,
        moe.ROUTER,
        moe.EXPERT_GATE_UP,
        moe.EXPERT_DOWN,
        *moe.DENSE_MLP,
        dense.FINAL_NORM,
        dense.HEAD,
    ),
    transformer={"qk_layernorm": True, "moe_router_score_function": "softmax"},
    sizes={"experts": ("num_experts", "num_local_experts"), "expert_ffn": ("moe_intermediate_size",)},
    reads=frozenset({"decoder_sparse_step", "mlp_only_layers", "num_experts_per_tok", "norm_topk_prob"}),
    derive=_layers,
    settings=_routing,
    requires={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False, None),
        "layer_types": ("full_attention",),
        "attention_dropout": (0, None),
    },
    # The sliding window's own fields count only where use_sliding_window is on, which is refused. The balancing loss is megarl's
    # to set: a checkpoint's coefficient was for its pre-training.
    ignores=frozenset({"sliding_window", "max_window_layers", "router_aux_loss_coef", "output_router_logits"}),
    defaults={"head_dim": 128},
)
