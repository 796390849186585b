"""Rules that dense decoders with grouped-query attention and a gated MLP share; a family's table picks from them."""

from __future__ import annotations

from dataclasses import replace

from megarl.bridge.family import Rule
from megarl.bridge.layout import Split, interleaved_by_group

HF = "model.layers.{L}."
MEGATRON = "decoder.layers.{L}."


def _qkv(kind: str, shape: str) -> Rule:
    names = {f"{HF}self_attn.{x}_proj.{kind}": f"{size} {shape}" for x, size in (("q", "q"), ("k", "kv"), ("v", "kv"))}
    name = f"{MEGATRON}self_attention.linear_qkv.{kind}"
    return Rule(names, name, split=Split.ROWS, join=interleaved_by_group)


EMBEDDING = Rule(
    {"model.embed_tokens.weight": "vocab hidden"},
    "embedding.word_embeddings.weight",
    split=Split.ROWS,
    stage="first",
    pad_vocabulary=True,
)
ATTENTION_NORM = Rule(
    {f"{HF}input_layernorm.weight": "hidden"},
    f"{MEGATRON}input_layernorm.weight",
    te=f"{MEGATRON}self_attention.linear_qkv.layer_norm_weight",
)
QKV = _qkv("weight", "hidden")
QKV_BIAS = _qkv("bias", "")
Q_NORM = Rule({f"{HF}self_attn.q_norm.weight": "head_dim"}, f"{MEGATRON}self_attention.q_layernorm.weight")
K_NORM = Rule({f"{HF}self_attn.k_norm.weight": "head_dim"}, f"{MEGATRON}self_attention.k_layernorm.weight")
ATTENTION_OUT = Rule(
    {f"{HF}self_attn.o_proj.weight": "hidden q"},
    f"{MEGATRON}self_attention.linear_proj.weight",
    split=Split.COLUMNS,
)
MLP_NORM = Rule(
    {f"{HF}post_attention_layernorm.weight": "hidden"},
    f"{MEGATRON}pre_mlp_layernorm.weight",
    te=f"{MEGATRON}mlp.linear_fc1.layer_norm_weight",
)
GATE_UP = Rule(
    {f"{HF}mlp.gate_proj.weight": "ffn hidden", f"{HF}mlp.up_proj.weight": "ffn hidden"},
    f"{MEGATRON}mlp.linear_fc1.weight",
    split=Split.ROWS,
)
# The same where the checkpoint has both in one tensor.
FUSED_GATE_UP = replace(GATE_UP, hf={f"{HF}mlp.gate_up_proj.weight": "ffn+ffn hidden"})
DOWN = Rule({f"{HF}mlp.down_proj.weight": "hidden ffn"}, f"{MEGATRON}mlp.linear_fc2.weight", split=Split.COLUMNS)
FINAL_NORM = Rule({"model.norm.weight": "hidden"}, "decoder.final_layernorm.weight", stage="last")
HEAD = Rule(
    {"lm_head.weight": "vocab hidden"},
    "output_layer.weight",
    split=Split.ROWS,
    stage="last",
    pad_vocabulary=True,
    tied_to="model.embed_tokens.weight",
)


def post_norms(attention: str, mlp: str) -> tuple[Rule, Rule]:
    """The norms of what attention and MLP answer; the names are those of the layer's modules. Megatron has none: layer.py."""
    return (
        Rule({f"{HF}{attention}.weight": "hidden"}, f"{MEGATRON}post_self_attn_layernorm.weight"),
        Rule({f"{HF}{mlp}.weight": "hidden"}, f"{MEGATRON}post_mlp_layernorm.weight"),
    )
