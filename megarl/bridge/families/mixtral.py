"""Mixtral: Llama's attention, every MLP a mixture of experts, a router whose chosen scores sum to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.bridge import dense, moe
from megarl.bridge.family import Config, Family
from megarl.errors import UserError


def _layers(config: Config, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {"sparse": (True,) * sizes["layers"], "expert_ffn": sizes["ffn"]}


def _routing(config: Config) -> dict[str, Any]:
    count = moe.chosen(config)
    if count == 1:
        raise UserError("config.json: num_experts_per_tok = 1 gives Mixtral's router no gradient: not supported.")
    return {"moe_router_topk": count, "moe_router_pre_softmax": False}


MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    rules=(
        dense.EMBEDDING,
        dense.ATTENTION_NORM,
        dense.QKV,
        dense.ATTENTION_OUT,
        moe.NORM,
        moe.router("block_sparse_moe"),
        *moe.experts("block_sparse_moe", "w1", "w3", "w2"),
        dense.FINAL_NORM,
        dense.HEAD,
    ),
    transformer={"moe_router_score_function": "softmax"},
    sizes={"experts": ("num_local_experts",)},
    reads=frozenset({"num_experts_per_tok"}),
    derive=_layers,
    settings=_routing,
    requires={
        "hidden_act": ("silu",),
        "sliding_window": (None,),
        "router_jitter_noise": (0, None),
        "attention_dropout": (0, None),
    },
    # The balancing loss is megarl's to set: a checkpoint's coefficient was for its pre-training.
    ignores=frozenset({"router_aux_loss_coef", "output_router_logits"}),
    defaults={"num_key_value_heads": 8, "head_dim": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
)
