"""gpt-oss, its weights unquantised: sinks in the attention, every other layer with a window, experts with biases and a clamped gate.

The checkpoint has a layer's experts in four tensors: expert by expert, matrices transposed, rows of gate and up taking turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.bridge import dense, moe
from megarl.bridge.dense import HF, MEGATRON
from megarl.bridge.family import Config, Family, Rule
from megarl.bridge.fields import number
from megarl.bridge.layout import Split
from megarl.bridge.windows import sliding_layers, window_settings
from megarl.errors import UserError

_EXPERTS, _LOCAL, _GROUPED = (
    f"{HF}mlp.experts.",
    f"{MEGATRON}mlp.experts.local_experts.{{E}}.",
    f"{MEGATRON}mlp.experts.",
)


def _expert(hf: str, shape: str, megarl: str, kind: str, split: Split) -> Rule:
    name, te = f"{_LOCAL}{megarl}.{kind}", f"{_GROUPED}{megarl}.{kind}{{E}}"
    return Rule({f"{_EXPERTS}{hf}": shape}, name, te=te, split=split, transposed=kind == "weight", layers=moe.sparse)


def _layers(config: Config, sizes: Mapping[str, int]) -> dict[str, Any]:
    return {"sparse": (True,) * sizes["layers"], "expert_ffn": sizes["ffn"]}


def _rope(config: Config) -> Config:
    """transformers takes YaRN for granted where config.json says nothing."""
    if config.get("rope_scaling") or config.get("rope_parameters"):
        return config
    usual = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    return {**config, "rope_scaling": usual}


def _settings(config: Config) -> dict[str, Any]:
    count = moe.chosen(config)
    if count == 1:
        raise UserError("config.json: num_experts_per_tok = 1 gives gpt-oss's router no gradient: not supported.")
    return {
        "moe_router_topk": count,
        "activation_func_clamp_value": number(config, "swiglu_limit", 7.0),
        **window_settings(config, 128, sliding_layers(config, every=2)),
    }


GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    rules=(
        dense.EMBEDDING,
        dense.ATTENTION_NORM,
        dense.QKV,
        dense.QKV_BIAS,
        Rule({f"{HF}self_attn.sinks": "heads"}, f"{MEGATRON}self_attention.core_attention.softmax_offset", Split.ROWS),
        dense.ATTENTION_OUT,
        Rule({f"{HF}self_attn.o_proj.bias": "hidden"}, f"{MEGATRON}self_attention.linear_proj.bias"),
        moe.NORM,
        replace(moe.ROUTER, hf={f"{HF}mlp.router.weight": "experts hidden"}),
        Rule({f"{HF}mlp.router.bias": "experts"}, f"{MEGATRON}mlp.router.bias", layers=moe.sparse),
        _expert("gate_up_proj", "expert_ffn|expert_ffn hidden", "linear_fc1", "weight", Split.ROWS),
        _expert("gate_up_proj_bias", "expert_ffn|expert_ffn", "linear_fc1", "bias", Split.ROWS),
        _expert("down_proj", "hidden expert_ffn", "linear_fc2", "weight", Split.COLUMNS),
        _expert("down_proj_bias", "hidden", "linear_fc2", "bias", Split.NONE),
        dense.FINAL_NORM,
        dense.HEAD,
    ),
    transformer={
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "activation": "quick_gelu",  # x · σ(1.702 x)
        "glu_linear_offset": 1.0,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,  # over the chosen experts
    },
    sizes={"experts": ("num_local_experts", "num_experts")},
    reads=frozenset({"num_experts_per_tok", "swiglu_limit", "sliding_window", "layer_types"}),
    derive=_layers,
    settings=_settings,
    rope=_rope,
    yarn=True,
    requires={
        "hidden_act": ("silu",),
        "attention_bias": (True,),
        "attention_dropout": (0, None),
        "swiglu_alpha": (1.702, None),
    },
    # The balancing loss is megarl's to set. What a published config.json says beside that follows from other fields.
    ignores=frozenset({"router_aux_loss_coef", "output_router_logits", "experts_per_token", "initial_context_length"}),
    defaults={"head_dim": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 150000.0},
)
