"""Rules of multi-head latent attention (arXiv:2405.04434, sec. 2.1), and what DeepSeek's families share beside it.

Queries and key-values go through latents of low rank. The projections down are on every tensor-parallel rank, those up are
cut by head. Heads are laid down as Hugging Face has them, so no rule moves a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.bridge import moe
from megarl.bridge.dense import HF, MEGATRON
from megarl.bridge.family import Config, Dims, Rule
from megarl.bridge.fields import whole
from megarl.bridge.layout import Split
from megarl.errors import UserError

_A, _M = f"{HF}self_attn.", f"{MEGATRON}self_attention."


def _two_steps(dims: Dims, layer: int) -> bool:
    return dims.q_rank > 0


def _one_step(dims: Dims, layer: int) -> bool:
    return dims.q_rank == 0


# Transformer Engine fuses the latents' norms with the projections up, but the layer's norm with nothing.
ATTENTION = (
    Rule({f"{HF}input_layernorm.weight": "hidden"}, f"{MEGATRON}input_layernorm.weight"),
    Rule({f"{_A}q_proj.weight": "q hidden"}, f"{_M}linear_q_proj.weight", split=Split.ROWS, layers=_one_step),
    Rule({f"{_A}q_a_proj.weight": "q_rank hidden"}, f"{_M}linear_q_down_proj.weight", layers=_two_steps),
    Rule(
        {f"{_A}q_a_layernorm.weight": "q_rank"},
        f"{_M}q_layernorm.weight",
        te=f"{_M}linear_q_up_proj.layer_norm_weight",
        layers=_two_steps,
    ),
    Rule({f"{_A}q_b_proj.weight": "q q_rank"}, f"{_M}linear_q_up_proj.weight", split=Split.ROWS, layers=_two_steps),
    Rule({f"{_A}kv_a_proj_with_mqa.weight": "kv_down hidden"}, f"{_M}linear_kv_down_proj.weight"),
    Rule(
        {f"{_A}kv_a_layernorm.weight": "kv_rank"},
        f"{_M}kv_layernorm.weight",
        te=f"{_M}linear_kv_up_proj.layer_norm_weight",
    ),
    Rule({f"{_A}kv_b_proj.weight": "kv_up kv_rank"}, f"{_M}linear_kv_up_proj.weight", split=Split.ROWS),
    Rule({f"{_A}o_proj.weight": "hidden v"}, f"{_M}linear_proj.weight", split=Split.COLUMNS),
)

SIZES: Mapping[str, tuple[str, ...]] = {
    "kv_rank": ("kv_lora_rank",),
    "nope_dim": ("qk_nope_head_dim",),
    "rope_dim": ("qk_rope_head_dim",),
    "v_dim": ("v_head_dim",),
    "experts": ("n_routed_experts", "num_experts"),
    "expert_ffn": ("moe_intermediate_size",),
}
READS = frozenset({"q_lora_rank", "first_k_dense_replace", "n_shared_experts", "num_experts_per_tok", "qk_head_dim"})
# transformers 5 writes derived sizes too (`qk_head_dim`, and as `head_dim` the positional part), which are read from their sources.
REQUIRES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "attention_dropout": (0, None),
    "moe_layer_freq": (1, None),
    # The norms of the latents have this epsilon in transformers whatever the config says.
    "rms_norm_eps": (1e-6,),
}
# How pre-training balanced its experts and was spread over machines.
IGNORES = frozenset({"aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp", "output_router_logits"})


def derive(config: Config, sizes: Mapping[str, int]) -> dict[str, Any]:
    """A head's size is its two parts'; beside that what `moe.after_dense` says."""
    if sizes["heads"] != sizes["kv_heads"]:
        raise UserError(
            f"config.json: num_key_value_heads = {sizes['kv_heads']} must equal num_attention_heads = {sizes['heads']}: "
            "with latent attention every head has its own key and value."
        )
    head = sizes["nope_dim"] + sizes["rope_dim"]
    if config.get("qk_head_dim", head) != head:
        raise UserError(f"config.json: qk_head_dim = {config['qk_head_dim']!r} must be its two parts' sum, {head}.")
    rank = whole(config, "q_lora_rank", 1) if config.get("q_lora_rank") is not None else 0
    return {"head_dim": head, "q_rank": rank, **moe.after_dense(config, sizes)}
