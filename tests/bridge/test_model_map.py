"""The map against an independent statement of Megatron's layout, and against what transformers says a model holds."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from megarl.bridge import dense, families
from megarl.bridge.families.qwen2 import QWEN2
from megarl.bridge.families.qwen3 import QWEN3
from megarl.bridge.family import Dims, Family, Rule
from megarl.bridge.family import families as known_families
from megarl.bridge.hf_config import Rope, check_fields
from megarl.bridge.layout import Cut, Split, uncovered
from megarl.bridge.model_map import ModelMap
from megarl.errors import UserError
from megarl.models.tiny import RECIPES, tiny_config
from tests.bridge.cases import CONFIGS, LAYOUTS, numbered, one_by_one, ranks


def megatron_tensor(model: ModelMap, name: str, hf: dict[str, Tensor], where: Cut) -> Tensor:
    """A rank's tensor by reshapes and chunks of whole tensors: nothing in common with the map's regions."""
    dims = model.dims
    prefix, _, rest = name.rpartition("decoder.layers.")[2].partition(".")
    layer = f"model.layers.{prefix}."
    rank, tp = where.tensor, where.tensor_size
    if "linear_qkv" in rest:
        kind = rest.rpartition(".")[2]
        q, k, v = (hf[f"{layer}self_attn.{x}_proj.{kind}"] for x in "qkv")
        blocks = [x.reshape(dims.kv_heads, -1, *x.shape[1:]) for x in (q, k, v)]
        return torch.cat(blocks, 1).flatten(0, 1).chunk(tp, 0)[rank]
    if model.family == "gpt_oss" and (special := gpt_oss_tensor(layer, rest, hf, where)) is not None:
        return special
    if "mlp" in rest and rest != "post_mlp_layernorm.weight":
        return mlp_tensor(model, layer, rest, hf, where)
    if model.is_latent and rest in LATENT:
        hf_name, axis = LATENT[rest]
        return hf[f"{layer}self_attn.{hf_name}.weight"].chunk(tp if axis is not None else 1, axis or 0)[
            rank if axis is not None else 0
        ]
    if "linear_proj" in rest:
        return hf[f"{layer}self_attn.o_proj.weight"].chunk(tp, 1)[rank]
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        table = hf["model.embed_tokens.weight" if model.tied or name.startswith("embedding") else "lm_head.weight"]
        padding = -len(table) % tp
        return torch.cat([table, torch.zeros(padding, table.shape[1], dtype=table.dtype)]).chunk(tp, 0)[rank]
    if name == "decoder.final_layernorm.weight":
        return hf["model.norm.weight"]
    norms = {
        "input_layernorm.weight": "input_layernorm",
        "self_attention.q_layernorm.weight": "self_attn.q_norm",
        "self_attention.k_layernorm.weight": "self_attn.k_norm",
        "post_self_attn_layernorm.weight": AROUND[model.family][1],
        "post_mlp_layernorm.weight": AROUND[model.family][2],
    }
    return hf[f"{layer}{norms[rest]}.weight"]


def gpt_oss_tensor(layer: str, rest: str, hf: dict[str, Tensor], where: Cut) -> Tensor | None:
    """What no other family has; None: not that."""
    if rest == "self_attention.core_attention.softmax_offset":
        return hf[f"{layer}self_attn.sinks"].chunk(where.tensor_size)[where.tensor]
    if rest == "self_attention.linear_proj.bias":
        return hf[f"{layer}self_attn.o_proj.bias"]
    if "router" in rest:
        return hf[f"{layer}{rest}"]
    if "local_experts" not in rest:
        return None
    number, linear, kind = rest.rpartition("local_experts.")[2].split(".")
    name = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}[linear]
    tensor = hf[f"{layer}mlp.experts.{name}{'_bias' if kind == 'bias' else ''}"][int(number)]
    rank, size = where.expert_tensor, where.expert_tensor_size
    if linear == "linear_fc2":
        return tensor if kind == "bias" else tensor.t().chunk(size, 1)[rank]
    rows = tensor if kind == "bias" else tensor.t()
    return torch.cat([rows[half::2].chunk(size)[rank] for half in (0, 1)])


# Latent attention: the tensor, and the axis that tensor parallelism cuts.
LATENT = {
    "self_attention.linear_q_proj.weight": ("q_proj", 0),
    "self_attention.linear_q_down_proj.weight": ("q_a_proj", None),
    "self_attention.linear_q_up_proj.weight": ("q_b_proj", 0),
    "self_attention.linear_kv_down_proj.weight": ("kv_a_proj_with_mqa", None),
    "self_attention.linear_kv_up_proj.weight": ("kv_b_proj", 0),
    "self_attention.kv_layernorm.weight": ("kv_a_layernorm", None),
    "self_attention.q_layernorm.weight": ("q_a_layernorm", None),
}


# The norms before the MLP, behind the attention and behind the MLP, where there are any.
_GEMMA = ("pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")
AROUND: dict[str, tuple[str, ...]] = defaultdict(
    lambda: ("post_attention_layernorm", "none", "none"),
    glm4=("post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
    gemma2=_GEMMA,
    gemma3_text=_GEMMA,
)


def mlp_tensor(model: ModelMap, layer: str, rest: str, hf: dict[str, Tensor], where: Cut) -> Tensor:
    """The norm, the router, an expert, the shared experts or the dense MLP of a layer."""
    if rest == "pre_mlp_layernorm.weight":
        return hf[f"{layer}{AROUND[model.family][0]}.weight"]
    mixtral = model.family == "mixtral"
    block = f"{layer}{'block_sparse_moe' if mixtral else 'mlp'}."
    if "router" in rest:
        return hf[f"{block}gate.{'weight' if rest.endswith('weight') else 'e_score_correction_bias'}"]
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    rank, size = where.tensor, where.tensor_size
    if "local_experts" in rest:
        block += f"experts.{rest.split('local_experts.')[1].split('.')[0]}."
        rank, size = where.expert_tensor, where.expert_tensor_size
    elif "shared_experts" in rest:
        block += "shared_experts."
    if "linear_fc1" in rest and model.family.startswith("glm") and not model.has_experts:
        halves = hf[f"{block}gate_up_proj.weight"].chunk(2)
        return torch.cat([half.chunk(size, 0)[rank] for half in halves])
    if "linear_fc1" in rest:
        return torch.cat([hf[f"{block}{x}.weight"].chunk(size, 0)[rank] for x in (gate, up)])
    return hf[f"{block}{down}.weight"].chunk(size, 1)[rank]


@pytest.mark.parametrize(("name", "sizes"), LAYOUTS)
def test_every_rank_holds_what_megatron_expects(name: str, sizes: Cut) -> None:
    model = ModelMap.from_hf(CONFIGS[name])
    hf = numbered(model)
    each = model.dims.experts // sizes.expert_size
    for parameter in model.parameters:
        for where in ranks(sizes):
            if parameter.expert is not None and parameter.expert not in range(
                where.expert * each, (where.expert + 1) * each
            ):
                assert parameter.copies(where) == []
                continue
            local = torch.zeros(parameter.local_shape(where), dtype=torch.int64)
            for copy in parameter.copies(where):
                local[copy.local] = copy.of(hf[copy.hf_name][copy.hf])
            assert torch.equal(local, megatron_tensor(model, parameter.name, hf, where)), (parameter.name, where)


@pytest.mark.parametrize(("name", "sizes"), LAYOUTS)
def test_every_element_is_met_exactly_once(name: str, sizes: Cut) -> None:
    model = ModelMap.from_hf(CONFIGS[name])
    model.prove(sizes.tensor_size, sizes.expert_tensor_size)
    met = {hf: torch.zeros(shape, dtype=torch.int64) for hf, shape in model.hf_shapes.items()}
    real = padding = 0
    for parameter in model.parameters:
        for where in parameter.holders(sizes):
            filled = torch.zeros(parameter.local_shape(where), dtype=torch.int64)
            for copy in parameter.copies(where):
                filled[copy.local] += 1
                if parameter.exported:
                    met[copy.hf_name][copy.hf] += 1
            assert filled.max() == 1
            if parameter.pad_vocabulary:
                real, padding = real + int((filled == 1).sum()), padding + int((filled == 0).sum())
            else:
                assert filled.min() == 1, parameter.name
    assert all(bool((count == 1).all()) for count in met.values())
    tables = sum(parameter.pad_vocabulary for parameter in model.parameters)
    assert real == tables * model.dims.vocab * model.dims.hidden
    assert padding == tables * (-model.dims.vocab % sizes.tensor_size) * model.dims.hidden


@pytest.mark.parametrize("family", RECIPES)
def test_the_checkpoint_is_what_transformers_builds(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = tiny_config(family)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    tensors = {**dict(built.named_parameters()), **dict(built.named_buffers())}
    shapes = {name: tuple(tensor.shape) for name, tensor in one_by_one(tensors, config["model_type"]).items()}
    assert shapes == ModelMap.from_hf(config).hf_shapes


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "Llama"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("mixtral", "Mixtral"), ("mistral", "Mistral")],
)
def test_every_field_that_transformers_writes_is_understood(family: str, name: str) -> None:
    import transformers

    config = getattr(transformers, f"{name}Config")().to_dict() | {"architectures": [f"{name}ForCausalLM"]}
    model = ModelMap.from_hf(config)
    assert (model.family, model.dims.hidden, model.dims.layers) == (family, 4096, 32)
    assert model.model_args()["rotary_base"] == (1_000_000 if family == "mixtral" else 10_000)


def test_both_generations_of_rope_fields_are_read_alike() -> None:
    base = {key: value for key, value in CONFIGS["qwen3"].items() if key != "rope_theta"}
    old = ModelMap.from_hf({**base, "rope_theta": 5e5, "rope_scaling": None})
    new = ModelMap.from_hf({**base, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}})
    assert old.model_args() == new.model_args()
    assert old.model_args()["rotary_base"] == 500000


def test_rope_scaling_that_megatron_can_do_is_passed_on() -> None:
    llama3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = ModelMap.from_hf(
        {**CONFIGS["llama"], "rope_scaling": {**llama3, "original_max_position_embeddings": 8192}}
    )
    assert scaled.model_args()["rope_scaling"] is True
    assert scaled.model_args()["rope_scaling_factor"] == 32.0
    linear = ModelMap.from_hf({**CONFIGS["llama"], "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert linear.model_args()["seq_len_interpolation_factor"] == 2.0
    with pytest.raises(UserError, match="llama3"):  # another pre-training length is not what Megatron has built in
        ModelMap.from_hf({**CONFIGS["llama"], "rope_scaling": {**llama3, "original_max_position_embeddings": 4096}})


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "hidden_act", "gelu"),
        ("llama", "a_new_field", 3),
        ("llama", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("llama", "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("llama", "attention_dropout", 0.1),
        ("qwen2", "use_sliding_window", True),
        ("qwen2", "layer_types", ["full_attention", "sliding_attention"]),
        ("qwen3", "attention_bias", True),
        ("qwen3", "final_logit_softcapping", 30.0),
        ("qwen3", "hidden_size", "80"),
        ("qwen3", "num_key_value_heads", 4),
        ("glm4", "partial_rotary_factor", 0),
        ("glm4", "hidden_act", "gelu"),
        ("glm4", "sliding_window", 4096),
        ("gemma2", "hidden_activation", "gelu"),
        ("gemma2", "attention_bias", True),
        ("gemma2", "attn_logit_softcapping", -1.0),
        ("gemma2", "final_logit_softcapping", "30"),
        ("gemma2", "query_pre_attn_scalar", None),
        ("gemma2", "layer_types", ["full_attention"] * 3),
        ("gemma2", "layer_types", ["chunked_attention"] * 4),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma2", "partial_rotary_factor", 0.5),
        ("gemma2", "rope_local_base_freq", 1e4),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "sliding_window_pattern", 0),
        ("gemma3", "sliding_window", None),
        ("gemma3", "layer_types", [["full_attention"]] * 4),
        ("gemma3", "rope_local_base_freq", 0),
        ("gemma3", "rope_parameters", {"rope_type": "default", "rope_theta": 1e6}),
        ("gemma3", "rope_parameters", {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
        ("gemma3", "use_bidirectional_attention", True),
        ("gemma3", "vision_config", {}),
        ("gpt-oss", "attention_bias", False),
        ("gpt-oss", "swiglu_alpha", 1.5),
        ("gpt-oss", "swiglu_limit", 0),
        ("gpt-oss", "num_experts_per_tok", 1),
        ("gpt-oss", "sliding_window", None),
        ("gpt-oss", "rope_scaling", {"rope_type": "linear_by_parts", "factor": 4.0}),
        ("gpt-oss", "hidden_act", "gelu"),
        ("mistral", "sliding_window", 0),
        ("mistral", "sliding_window", "4096"),
        ("mistral", "layer_types", ["full_attention"] * 4),
        ("mistral", "use_sliding_window", True),
        ("mistral", "attention_bias", True),
    ],
)
def test_what_is_not_understood_is_refused_by_name(family: str, field: str, value: object) -> None:
    with pytest.raises(UserError) as caught:
        ModelMap.from_hf({**CONFIGS[family], field: value})
    sentence = str(caught.value)
    assert field in sentence or "rope" in sentence or "partial_rotary_factor" in sentence, sentence
    assert "\n" not in sentence


def test_all_refused_fields_are_told_at_once() -> None:
    with pytest.raises(UserError, match=r"one.*mlp_bias.*two"):
        check_fields(known_families()["LlamaForCausalLM"], {"one": 1, "mlp_bias": True, "two": 2})


def test_an_unknown_architecture_is_told_with_those_that_are_known() -> None:
    with pytest.raises(UserError, match=r"GPT2LMHeadModel.*LlamaForCausalLM.*Qwen3ForCausalLM"):
        ModelMap.from_hf({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    with pytest.raises(UserError, match="Qwen3ForSequenceClassification"):  # its model type alone would fit
        ModelMap.from_hf({**CONFIGS["qwen3"], "architectures": ["Qwen3ForSequenceClassification"]})


def test_missing_sizes_are_told_or_follow_from_others() -> None:
    without = {key: value for key, value in CONFIGS["qwen2"].items() if key != "num_key_value_heads"}
    with pytest.raises(UserError, match="num_key_value_heads"):
        ModelMap.from_hf(without)
    llama = {key: value for key, value in CONFIGS["llama"].items() if key not in ("num_key_value_heads", "head_dim")}
    dims = ModelMap.from_hf(llama).dims
    assert (dims.kv_heads, dims.head_dim) == (6, 12)


def test_parameters_answer_to_both_specs_names() -> None:
    model = ModelMap.from_hf(CONFIGS["qwen3"])
    assert model.parameter("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight").hf_names == (
        "model.layers.3.input_layernorm.weight",
    )
    assert model.parameter("decoder.layers.2.mlp.linear_fc1.layer_norm_weight") is model.parameter(
        "decoder.layers.2.pre_mlp_layernorm.weight"
    )
    assert model.parameter("decoder.layers.2.mlp.linear_fc1.weight").layer == 2
    with pytest.raises(UserError, match="decoder.layers.9"):
        model.parameter("decoder.layers.9.mlp.linear_fc1.weight")


def test_the_tied_output_layer_is_filled_but_not_exported() -> None:
    tied, untied = ModelMap.from_hf(CONFIGS["qwen2"]), ModelMap.from_hf(CONFIGS["qwen2-untied"])
    head = tied.parameter("output_layer.weight")
    assert (head.hf_names, head.exported, head.stage) == (("model.embed_tokens.weight",), False, "last")
    assert "lm_head.weight" not in tied.hf_shapes
    assert tied.model_args()["share_embeddings_and_output_weights"] is True
    assert untied.parameter("output_layer.weight").hf_names == ("lm_head.weight",)
    assert list(untied.hf_shapes)[-1] == "lm_head.weight"


def test_megatron_is_told_what_the_family_is() -> None:
    qwen2, qwen3 = (ModelMap.from_hf(CONFIGS[name]).transformer_config() for name in ("qwen2", "qwen3"))
    assert (qwen2["add_qkv_bias"], qwen2["qk_layernorm"], qwen2["kv_channels"]) == (True, False, 16)
    assert (qwen3["add_qkv_bias"], qwen3["qk_layernorm"], qwen3["kv_channels"]) == (False, True, 24)
    assert qwen3["num_query_groups"] == 2
    assert ModelMap.from_hf(CONFIGS["qwen3"]).model_args(2)["vocab_size"] == 420


def test_layouts_that_do_not_divide_are_told_with_the_nearest_that_do() -> None:
    model = ModelMap.from_hf(CONFIGS["qwen3"])
    assert model.check_layout(2, 2) == []
    assert model.check_layout(1, 4) == []
    heads, layers = model.check_layout(4, 3)
    assert "2 key-value heads and 6 attention heads" in heads
    assert heads.endswith("use 2.")
    assert "4 layers" in layers
    assert layers.endswith("use 2 or 4.")
    assert "at least 1" in model.check_layout(0, 1)[0]
    with pytest.raises(UserError, match="linear_qkv"):
        model.parameter("decoder.layers.0.self_attention.linear_qkv.weight").copies(Cut(tensor_size=4))


def without(family: Family, rule: Rule) -> Family:
    return dataclasses.replace(family, rules=tuple(other for other in family.rules if other is not rule))


def made(family: Family) -> ModelMap:
    dims = Dims(layers=2, hidden=10, ffn=12, heads=4, kv_heads=2, head_dim=6, vocab=7)
    return ModelMap(family, dims, Rope(10000.0), tied=False, norm_eps=1e-6, max_positions=8)


def test_a_map_with_a_fault_is_not_made() -> None:
    def drops_last_row(rows: object, groups: int) -> list:  # type: ignore[type-arg]
        return [piece._replace(length=piece.length - 1) for piece in dense.DOWN.join(rows, groups)]  # type: ignore[arg-type]

    def same_place(rows: object, groups: int) -> list:  # type: ignore[type-arg]
        return [piece._replace(target=0) for piece in dense.GATE_UP.join(rows, groups)]  # type: ignore[arg-type]

    made(QWEN3)
    faults = {
        "not covered": (dense.DOWN, dataclasses.replace(dense.DOWN, join=drops_last_row)),
        "overlap": (dense.GATE_UP, dataclasses.replace(dense.GATE_UP, join=same_place)),
        "two rules claim": (dense.DOWN, dense.GATE_UP),
    }
    for words, (rule, fault) in faults.items():
        rules = (*without(QWEN3, rule).rules, fault)
        if words == "two rules claim":
            rules = (*QWEN3.rules, dataclasses.replace(dense.GATE_UP, megatron="other.{L}"))
        with pytest.raises(ValueError, match=words):
            made(dataclasses.replace(QWEN3, rules=rules))


def test_a_rule_may_replicate_but_not_cut_unevenly() -> None:
    rule = dataclasses.replace(dense.ATTENTION_OUT, split=Split.NONE)
    model = made(dataclasses.replace(QWEN2, rules=(*without(QWEN2, dense.ATTENTION_OUT).rules, rule)))
    model.prove(2)  # replicated on purpose is legal
    uneven = dataclasses.replace(dense.ATTENTION_OUT, split=Split.ROWS)
    model = made(dataclasses.replace(QWEN2, rules=(*without(QWEN2, dense.ATTENTION_OUT).rules, uneven)))
    with pytest.raises(UserError, match="cannot cut"):
        model.prove(4)


def test_uncovered_finds_every_kind_of_fault() -> None:
    def box(*bounds: tuple[int, int]) -> tuple[slice, ...]:
        return tuple(slice(*bound) for bound in bounds)

    left, right = box((0, 4), (0, 3)), box((0, 4), (3, 6))
    assert uncovered((4, 6), [left, right]) is None
    assert "not covered" in str(uncovered((4, 6), [left]))
    assert "overlap" in str(uncovered((4, 6), [left, right, box((1, 2), (1, 2))]))
    # Missing one element and meeting another twice leaves the volume right.
    assert "overlap" in str(uncovered((4,), [box((0, 2)), box((1, 3))]))
    assert "outside" in str(uncovered((4,), [box((2, 5))]))
    assert "outside" in str(uncovered((4, 6), [box((0, 4))]))
    # Every other row, and those between.
    even, odd = (slice(0, 4), slice(0, 5, 2)), (slice(0, 4), slice(1, 6, 2))
    assert uncovered((4, 6), [even, odd]) is None
    assert (
        uncovered((4, 6), [(slice(0, 2), slice(0, 6)), (slice(2, 4), slice(0, 5, 2)), (slice(2, 4), slice(1, 6, 2))])
        is None
    )
    assert "not covered" in str(uncovered((4, 6), [even]))
    assert "overlap" in str(uncovered((4, 6), [even, even]))


def test_large_models_are_proved_from_their_sizes_alone() -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    model = ModelMap.from_hf(
        {**CONFIGS["llama"], **sizes, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}
    )
    for tp in (2, 4, 8):
        model.prove(tp)
    assert len(model.hf_shapes) == 80 * 9 + 3
    assert sum(torch.Size(shape).numel() for shape in model.hf_shapes.values()) == 70_553_706_496


TOY = '''
"""A family whose checkpoint names are its own."""

from megarl.bridge import dense
from megarl.bridge.family import Family, Rule
from megarl.bridge.layout import Split

TOY = Family(
    architecture="ToyForCausalLM",
    model_type="toy",
    rules=(
        Rule({"wte": "vocab hidden"}, "embedding.word_embeddings.weight", Split.ROWS, stage="first", pad_vocabulary=True),
        Rule({"h.{L}.out": "hidden q"}, "decoder.layers.{L}.self_attention.linear_proj.weight", Split.COLUMNS),
        dense.GATE_UP,
        dense.FINAL_NORM,
    ),
    requires={"hidden_act": ("silu",)},
    ignores=frozenset({"flavour"}),
    defaults={"head_dim": None},
)
'''


def test_a_new_family_is_one_new_file(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "megarl.bridge.families.toy", raising=False)
    keep = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = {key: CONFIGS["qwen2"][key] for key in (*keep, "vocab_size", "hidden_act")}
    model = ModelMap.from_hf({**config, "architectures": ["ToyForCausalLM"], "model_type": "toy", "flavour": "sweet"})
    model.prove(2)
    assert model.family == "toy"
    assert model.parameter("decoder.layers.3.self_attention.linear_proj.weight").hf_names == ("h.3.out",)
    assert known_families()["ToyForCausalLM"].model_type == "toy"


def test_a_family_that_is_wrong_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    rule = 'Rule({"qkv": "q+kv+kv hidden"}, "decoder.layers.{L}.self_attention.linear_qkv.weight", split=Split.ROWS)'
    (tmp_path / "ill.py").write_text(
        "from megarl.bridge.family import Rule\nfrom megarl.bridge.layout import Split\n" + rule
    )
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "megarl.bridge.families.ill", raising=False)
    with pytest.raises(UserError, match=r"families\.ill cannot be loaded: .*give join=interleaved_by_group"):
        known_families()


def test_a_map_is_made_without_loading_torch() -> None:
    """Configurations are checked against a map before anything heavy is imported."""
    code = (
        "import sys; from megarl.bridge.model_map import ModelMap; from megarl.models.tiny import tiny_config; "
        "import megarl.models.smollm2; ModelMap.from_hf(tiny_config('qwen3')); "
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
