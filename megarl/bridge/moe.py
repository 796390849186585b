"""Rules of mixture-of-experts layers: the router, the experts one by one, the shared experts; and the norm before them.

`transformers` 5 holds a layer's experts as two fused tensors in memory but writes and reads them one by one under these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from megarl.bridge import dense
from megarl.bridge.dense import HF, MEGATRON
from megarl.bridge.family import Config, Dims, Rule
from megarl.bridge.fields import either, number, short, whole
from megarl.bridge.layout import Split
from megarl.errors import UserError

# Names of how many experts a layer has: a family understands some of them, and the others are refused before.
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


def sparse(dims: Dims, layer: int) -> bool:
    """Layers whose MLP is a mixture of experts."""
    return dims.is_sparse(layer)


def not_sparse(dims: Dims, layer: int) -> bool:
    """Layers whose MLP is an ordinary one."""
    return not dims.is_sparse(layer)


def experts(block: str, gate: str, up: str, down: str) -> tuple[Rule, Rule]:
    """The two matrices of every expert; `block` is the layer's module, the other names those of an expert's matrices."""
    expert = f"{HF}{block}.experts.{{E}}."
    local, grouped = f"{MEGATRON}mlp.experts.local_experts.{{E}}.", f"{MEGATRON}mlp.experts."
    return (
        Rule(
            {f"{expert}{gate}.weight": "expert_ffn hidden", f"{expert}{up}.weight": "expert_ffn hidden"},
            f"{local}linear_fc1.weight",
            te=f"{grouped}linear_fc1.weight{{E}}",
            split=Split.ROWS,
            layers=sparse,
        ),
        Rule(
            {f"{expert}{down}.weight": "hidden expert_ffn"},
            f"{local}linear_fc2.weight",
            te=f"{grouped}linear_fc2.weight{{E}}",
            split=Split.COLUMNS,
            layers=sparse,
        ),
    )


def router(block: str) -> Rule:
    """The router's matrix: the same on every rank."""
    return Rule({f"{HF}{block}.gate.weight": "experts hidden"}, f"{MEGATRON}mlp.router.weight", layers=sparse)


EXPERT_GATE_UP, EXPERT_DOWN = experts("mlp", "gate_proj", "up_proj", "down_proj")
ROUTER = router("mlp")
# Added to the scores when experts are chosen, not when they are weighed (arXiv:2412.19437, sec. 2.1.2).
ROUTER_BIAS = Rule(
    {f"{HF}mlp.gate.e_score_correction_bias": "experts"},
    f"{MEGATRON}mlp.router.expert_bias",
    layers=sparse,
    float32=True,
)
SHARED_GATE_UP = Rule(
    {
        f"{HF}mlp.shared_experts.gate_proj.weight": "shared_ffn hidden",
        f"{HF}mlp.shared_experts.up_proj.weight": "shared_ffn hidden",
    },
    f"{MEGATRON}mlp.shared_experts.linear_fc1.weight",
    split=Split.ROWS,
    layers=sparse,
)
SHARED_DOWN = Rule(
    {f"{HF}mlp.shared_experts.down_proj.weight": "hidden shared_ffn"},
    f"{MEGATRON}mlp.shared_experts.linear_fc2.weight",
    split=Split.COLUMNS,
    layers=sparse,
)
# Transformer Engine fuses the norm with an ordinary MLP, but not with experts.
NORM = replace(dense.MLP_NORM, te=None, layers=sparse)
# The MLP of the layers that are not sparse.
DENSE_MLP = tuple(replace(rule, layers=not_sparse) for rule in (dense.MLP_NORM, dense.GATE_UP, dense.DOWN))


def some_sparse(pattern: Iterable[bool], what: str) -> dict[str, Any]:
    """`Dims.sparse`, once it is sure that there are experts at all."""
    layers = tuple(pattern)
    if not any(layers):
        raise UserError(f"config.json: {what} leave no layer with experts; give the dense architecture instead.")
    return {"sparse": layers}


def chosen(config: Config) -> int:
    """How many experts a token goes to."""
    count, total = config.get("num_experts_per_tok"), either(config, EXPERTS)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UserError(f"config.json: num_experts_per_tok = {short(count)} must be a positive whole number.")
    if isinstance(total, int) and count > total:
        raise UserError(f"config.json: num_experts_per_tok = {count} is more than the {total} experts there are.")
    return count


def after_dense(config: Config, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The first layers are dense; the shared experts are one MLP of all their sizes."""
    dense_layers = whole(config, "first_k_dense_replace", 0)
    if dense_layers >= sizes["layers"]:
        raise UserError(
            f"config.json: first_k_dense_replace = {dense_layers} leaves none of {sizes['layers']} layers with experts."
        )
    return {
        "sparse": tuple(layer >= dense_layers for layer in range(sizes["layers"])),
        "shared_ffn": whole(config, "n_shared_experts", 1) * sizes["expert_ffn"],
    }


# Of `biased_sigmoid`.
BIASED_SIGMOID: Mapping[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,  # the scores are taken before the choice
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,  # the bias stays what the checkpoint says
}


def biased_sigmoid(config: Config) -> dict[str, Any]:
    """k experts by score + bias, out of the `topk_group` groups whose two best sum highest; weights are the scores, divided by
    their sum and scaled (arXiv:2412.19437, sec. 2.1.2)."""
    count, total = chosen(config), either(config, EXPERTS)
    groups, best = config.get("n_group") or 1, config.get("topk_group") or 1
    if count == 1:
        raise UserError("config.json: num_experts_per_tok = 1 gives the router no gradient: not supported.")
    arguments = {
        "moe_router_topk": count,
        "moe_router_topk_scaling_factor": float(number(config, "routed_scaling_factor", None) or 1.0),
    }
    if best < groups:
        # Megatron rates a group by its k // topk_group best, transformers by its two best.
        if count // best != 2:
            raise UserError(
                f"config.json: num_experts_per_tok = {count} with topk_group = {best} is not supported: "
                f"Megatron would rate a group by its {count // best} best experts, the model by its two best."
            )
        if total % groups or total < 2 * groups:
            raise UserError(f"config.json: n_group = {groups} must cut {total} experts into equal groups of 2 or more.")
        arguments |= {"moe_router_num_groups": groups, "moe_router_group_topk": best}
    return arguments
