"""Published mixtures of experts in the layouts that people use, on shapes alone; and what their families refuse."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

import pytest

from megarl.bridge.layout import Cut, uncovered
from megarl.bridge.model_map import ModelMap
from megarl.errors import UserError
from tests.bridge.cases import CONFIGS
from tests.bridge.full_size import (
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    GEMMA_2_27B,
    GEMMA_3_27B,
    GLM_4_5,
    GLM_4_9B,
    GPT_OSS_120B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    MTP_NAMES,
    QWEN3_30B,
    QWEN3_235B,
)

# Model, tensor, expert, expert tensor parallelism; parameters, as the models' cards round them and as their tensors sum up.
FULL = {
    "DeepSeek-V3, TP8 EP64": (DEEPSEEK_V3, Cut(tensor_size=8, expert_size=64), 684_489_845_504),
    "DeepSeek-V3, TP1 EP256": (DEEPSEEK_V3, Cut(tensor_size=1, expert_size=256), 684_489_845_504),
    "DeepSeek-V3, TP16 EP8 ETP4": (
        DEEPSEEK_V3,
        Cut(tensor_size=16, expert_size=8, expert_tensor_size=4),
        684_489_845_504,
    ),
    "Qwen3-235B, TP4 EP32": (QWEN3_235B, Cut(tensor_size=4, expert_size=32), 235_093_634_560),
    "Qwen3-235B, TP2 EP8 ETP2": (QWEN3_235B, Cut(tensor_size=2, expert_size=8, expert_tensor_size=2), 235_093_634_560),
    "Qwen3-30B, TP4 EP8": (QWEN3_30B, Cut(tensor_size=4, expert_size=8), 30_532_122_624),
    "Mixtral-8x7B, TP8 EP8": (MIXTRAL_8X7B, Cut(tensor_size=8, expert_size=8), 46_702_792_704),
    "DeepSeek-V2-Lite, TP4 EP16": (DEEPSEEK_V2_LITE, Cut(tensor_size=4, expert_size=16), 15_706_484_224),
    "GLM-4.5, TP8 EP32": (GLM_4_5, Cut(tensor_size=8, expert_size=32), 358_337_791_296),
    "GLM-4-9B, TP2": (GLM_4_9B, Cut(tensor_size=2), 9_400_279_040),
    "Gemma-2-27B, TP8": (GEMMA_2_27B, Cut(tensor_size=8), 27_227_128_320),
    "Gemma-3-27B, TP16": (GEMMA_3_27B, Cut(tensor_size=16), 27_009_346_304),
    "gpt-oss-120b, TP8 EP16": (
        GPT_OSS_120B,
        Cut(tensor_size=8, expert_size=16),
        116_829_156_672,
    ),
    "Mistral-7B, TP8": (MISTRAL_7B, Cut(tensor_size=8), 7_241_732_096),
}


SLOW = ("GLM-4.5, TP8 EP32", "DeepSeek-V3, TP1 EP256", "DeepSeek-V3, TP16 EP8 ETP4", "Qwen3-235B, TP2 EP8 ETP2")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FULL])
def test_every_tensor_of_a_published_model_has_its_place(name: str) -> None:
    config, sizes, total = FULL[name]
    model = ModelMap.from_hf(config, names=MTP_NAMES)
    assert sum(math.prod(shape) for shape in model.hf_shapes.values()) == total
    assert model.check_layout(sizes.tensor_size, 1, sizes.expert_size, sizes.expert_tensor_size, sequence=True) == []
    layers = sum(model.dims.sparse) + model.dims.mtp
    of_one = len({parameter.name for parameter in model.parameters if parameter.expert == 0}) // max(1, layers)
    met: dict[str, list] = defaultdict(list)
    held: Counter[tuple[int | None, int]] = Counter()  # experts' matrices by layer and expert-parallel rank
    for parameter in model.parameters:
        for where in parameter.holders(sizes):
            copies = parameter.copies(where)
            assert uncovered(parameter.local_shape(where), [copy.local for copy in copies]) is None
            if parameter.expert is not None and where.expert_tensor == 0:
                held[parameter.layer, where.expert] += 1
            for copy in copies if parameter.exported else ():
                met[copy.hf_name].append(copy.hf)
    assert set(met) == set(model.hf_shapes)
    assert all(uncovered(shape, met[name]) is None for name, shape in model.hf_shapes.items())
    assert len(held) == layers * sizes.expert_size
    assert set(held.values()) == ({of_one * model.dims.experts // sizes.expert_size} if layers else set())


@pytest.mark.parametrize("config", [DEEPSEEK_V3, QWEN3_235B], ids=["DeepSeek-V3", "Qwen3-235B"])
def test_pipeline_stages_part_the_layers_of_a_published_model(config: dict[str, Any]) -> None:
    """Sixteen stages, as even as they can be: each parameter has one stage, by its layer or as the first's or the last's."""
    model = ModelMap.from_hf(config)
    layers = model.dims.layers
    stage_of = [layer * 16 // layers for layer in range(layers)]
    ends = {"first": 0, "last": 15}
    found = Counter(
        ends[parameter.stage] if parameter.layer is None else stage_of[parameter.layer]
        for parameter in model.parameters
    )
    assert sum(found.values()) == len(model.parameters)
    assert set(found) == set(range(16))
    by_layer = Counter(parameter.layer for parameter in model.parameters)
    kinds = {model.dims.is_sparse(layer): {by_layer[layer] for layer in range(layers)} for layer in range(layers)}
    assert all(
        by_layer[layer] == by_layer[other]
        for layer in range(layers)
        for other in (0, layers - 1)
        if model.dims.is_sparse(layer) == model.dims.is_sparse(other)
    ), kinds


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("qwen3-moe", "attention_bias", True),
        ("qwen3-moe", "a_new_field", 3),
        ("qwen3-moe", "num_experts_per_tok", 11),
        ("qwen3-moe", "num_experts_per_tok", 1),
        ("qwen3-moe", "decoder_sparse_step", 0),
        ("qwen3-moe", "mlp_only_layers", [0, 1, 2, 3]),
        ("qwen3-moe", "num_experts", "10"),
        ("qwen3-moe", "num_experts", 10**6),
        ("qwen3-moe", "num_hidden_layers", 10**9),
        ("qwen3-moe", "num_attention_heads", 10**9),
        ("qwen3-moe", "vocab_size", 10**300),
        ("deepseek", "routed_scaling_factor", 10**400),
        ("deepseek", "routed_scaling_factor", "two"),
        ("mixtral", "sliding_window", 4096),
        ("mixtral", "router_jitter_noise", 0.1),
        ("mixtral", "num_experts_per_tok", 1),
        ("deepseek", "scoring_func", "softmax"),
        ("deepseek", "topk_method", "greedy"),
        ("deepseek", "norm_topk_prob", False),
        ("deepseek", "topk_group", 1),
        ("deepseek", "n_group", 5),
        ("deepseek", "rope_interleave", False),
        ("deepseek", "moe_layer_freq", 2),
        ("deepseek", "rms_norm_eps", 1e-5),
        ("deepseek", "qk_head_dim", 20),
        ("deepseek", "num_key_value_heads", 3),
        ("deepseek", "first_k_dense_replace", 4),
        ("deepseek", "n_shared_experts", 0),
        ("deepseek", "quantization_config", {"quant_method": "fp8"}),
        ("deepseek", "rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("deepseek", "rope_scaling", {**DEEPSEEK_V3["rope_scaling"], "attention_factor": 1.2}),
        ("deepseek", "rope_scaling", {**DEEPSEEK_V3["rope_scaling"], "mscale": None}),
        ("deepseek", "rope_scaling", {"type": "linear", "factor": 4.0}),
        ("deepseek-v2", "topk_method", "group_limited_greedy"),
        ("deepseek-v2", "mlp_bias", True),
        ("glm4-moe", "norm_topk_prob", False),
        ("glm4-moe", "num_experts_per_tok", 1),
        ("glm4-moe", "first_k_dense_replace", 4),
        ("glm4-moe", "n_shared_experts", 0),
        ("glm4-moe", "partial_rotary_factor", 1.5),
        ("glm4-moe", "scoring_func", "sigmoid"),
    ],
)
def test_what_megatron_cannot_say_is_refused_by_name(family: str, field: str, value: object) -> None:
    with pytest.raises(UserError) as caught:
        ModelMap.from_hf({**CONFIGS[family], field: value})
    sentence = str(caught.value)
    named = {"rope_scaling": "rope scaling", "quantization_config": "quantised"}.get(field, field)
    assert named in sentence, sentence
    assert "\n" not in sentence


# Families, and how transformers calls their configurations.
WRITTEN = {
    "qwen3-moe": "Qwen3Moe",
    "deepseek": "DeepseekV3",
    "deepseek-v2": "DeepseekV2",
    "mistral": "Mistral",
    "glm4-moe": "Glm4Moe",
    "gpt-oss": "GptOss",
    "glm": "Glm",
    "glm4": "Glm4",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3Text",
}


@pytest.mark.parametrize("family", WRITTEN)
def test_every_field_that_transformers_writes_is_understood(family: str) -> None:
    """And read as the file that it was made from, in which rotary fields are those of transformers 4."""
    import transformers

    tiny = {key: value for key, value in CONFIGS[family].items() if key not in ("architectures", "model_type")}
    written = getattr(transformers, f"{WRITTEN[family]}Config")(**tiny).to_dict()
    assert "rope_parameters" in written and "rope_theta" not in written
    model = ModelMap.from_hf({**written, "architectures": CONFIGS[family]["architectures"]})
    assert model.transformer_config() == ModelMap.from_hf(CONFIGS[family]).transformer_config()
    assert model.model_args() == ModelMap.from_hf(CONFIGS[family]).model_args()


def test_megatron_is_told_how_a_family_routes() -> None:
    v3 = ModelMap.from_hf(DEEPSEEK_V3).transformer_config()
    assert (v3["moe_router_score_function"], v3["moe_router_enable_expert_bias"]) == ("sigmoid", True)
    assert (v3["moe_router_num_groups"], v3["moe_router_group_topk"], v3["moe_router_topk_scaling_factor"]) == (
        8,
        4,
        2.5,
    )
    assert v3["moe_layer_freq"] == [0] * 3 + [1] * 58
    assert v3["moe_shared_expert_intermediate_size"] == 2048
    assert (v3["rope_type"], v3["rotary_scaling_factor"], v3["mscale_all_dim"]) == ("yarn", 40.0, 1.0)
    assert (v3["moe_aux_loss_coeff"], v3["moe_router_bias_update_rate"]) == (0.0, 0.0)
    qwen = ModelMap.from_hf(QWEN3_235B).transformer_config()
    assert (qwen["moe_router_topk"], qwen["moe_router_pre_softmax"]) == (8, False)
    assert (
        ModelMap.from_hf({**QWEN3_235B, "norm_topk_prob": False}).transformer_config()["moe_router_pre_softmax"] is True
    )
    plain = ModelMap.from_hf({**CONFIGS["deepseek"], "topk_group": 3}).transformer_config()
    assert "moe_router_num_groups" not in plain  # every group is looked into


def test_layouts_that_do_not_fit_experts_are_told() -> None:
    model = ModelMap.from_hf(CONFIGS["qwen3-moe"])
    assert model.check_layout(2, 2, 5, 4, sequence=True) == []
    (experts,) = model.check_layout(1, 1, 4)
    assert "10 experts of a layer" in experts
    assert experts.endswith("use 2 or 5.")
    (units,) = model.check_layout(1, 1, 1, 3)
    assert "40 units of an expert" in units
    (sequence,) = model.check_layout(2, 1, 2, 1, sequence=False)
    assert "sequence parallelism" in sequence
    (none,) = ModelMap.from_hf(CONFIGS["llama"]).check_layout(1, 1, 2)
    assert "needs a model with experts" in none
    (shared,) = ModelMap.from_hf(CONFIGS["deepseek-one-step"]).check_layout(4, 1, 1, 1)
    assert "6 attention heads" in shared


def test_only_what_is_kept_in_float32_is_named() -> None:
    names = ModelMap.from_hf(CONFIGS["deepseek"]).float32
    assert names == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)}
    assert ModelMap.from_hf(CONFIGS["qwen3-moe"]).float32 == frozenset()


def test_experts_answer_to_both_specs_names() -> None:
    model = ModelMap.from_hf(CONFIGS["qwen3-moe"])
    local = model.parameter("decoder.layers.2.mlp.experts.local_experts.7.linear_fc1.weight")
    assert local is model.parameter("decoder.layers.2.mlp.experts.linear_fc1.weight7")
    assert local.hf_names == tuple(f"model.layers.2.mlp.experts.7.{x}_proj.weight" for x in ("gate", "up"))
    latent = ModelMap.from_hf(CONFIGS["deepseek"])
    assert latent.parameter("decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight") is latent.parameter(
        "decoder.layers.0.self_attention.kv_layernorm.weight"
    )
    # Transformer Engine fuses the norm before the MLP where the MLP is dense, and only there.
    assert latent.parameter("decoder.layers.0.mlp.linear_fc1.layer_norm_weight").layer == 0
    with pytest.raises(UserError):
        latent.parameter("decoder.layers.1.mlp.linear_fc1.layer_norm_weight")
