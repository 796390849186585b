"""Values of config.json that are not of their field's kind: one sentence that names the field, the value and what would be right."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from megarl.bridge.family import MTP, families
from megarl.bridge.fields import COUNT, KINDS, NAME, NOT_NEGATIVE, OBJECT, ROPE_KINDS, Kind
from megarl.bridge.heads import Head
from megarl.bridge.hf_config import PER_LAYER, READ, USUAL, check_fields
from megarl.bridge.model_map import ModelMap
from megarl.bridge.moe import EXPERTS
from megarl.errors import UserError
from megarl.models.tiny import RECIPES, tiny_config

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
LISTS = {"layer_types", "mlp_only_layers"}  # whose lengths and items their families look at


def wrong(kind: Kind) -> list[Any]:
    """Values that are not of a kind."""
    found: list[Any] = ["1e-6", "false", [1], {"a": 1}, math.nan, math.inf, -1, -0.5, 0, 10**400, 1.5, 1, True, ""]
    return [value for value in found if not kind.fits(value)] + ([] if kind.nullable else [None])


def test_a_kind_takes_what_it_says() -> None:
    for kind in {*KINDS.values(), *ROPE_KINDS.values()}:
        taken = {
            str(value)
            for value in (-1, 0, 0.5, 1, 2**31 - 1, 2**31, math.nan, math.inf, True, "", "a", [], {})
            if kind.fits(value)
        }
        if "number" in kind.what:
            least = {"0"} if kind in (COUNT, NOT_NEGATIVE) else set()
            assert taken == least | {"1", str(2**31 - 1)} | (set() if "whole" in kind.what else {"0.5", str(2**31)})
        else:
            assert taken == ({"a"} if kind == NAME else {"{}"} if kind == OBJECT else {"True"})


@pytest.mark.parametrize("family", RECIPES)
def test_every_field_that_a_family_reads_is_checked(family: str) -> None:
    config = tiny_config(family)
    found = families()[config["architectures"][0]]
    for field in sorted((READ | found.understands) - LISTS - found.requires.keys()):
        for value in wrong(KINDS[field]):
            refused({**config, field: value}, field, KINDS[field])


@pytest.mark.parametrize("family", RECIPES)
def test_a_field_that_must_be_as_it_is_takes_nothing_like_it(family: str) -> None:
    config = tiny_config(family)
    found = families()[config["architectures"][0]]
    layers = config["num_hidden_layers"]
    fixed = {key: usual for key, usual in USUAL.items() if key not in found.reads} | dict(found.requires)
    for field, allowed in fixed.items():
        first, each = allowed[0], list[Any]()
        if field in PER_LAYER:
            check_fields(found, {**config, field: [first] * layers})
            each = [[], [first] * (layers - 1), [first] * (layers + 1), [[first]] * layers, first]
        else:
            check_fields(found, {**config, field: first})
            alike = [int(first)] if isinstance(first, bool) else [bool(first)] if first in (0, 1) else []
            each = [[], {}, [first], "", [None], *alike]
        for value in each:
            with pytest.raises(UserError, match=rf"\b{field} = .* (is not supported|must say it for each of)"):
                check_fields(found, {**config, field: value})


@pytest.mark.parametrize("inside", ["rope_scaling", "rope_parameters"])
def test_what_is_said_of_positions_is_checked(inside: str) -> None:
    for field, kind in ROPE_KINDS.items():
        for value in wrong(kind):
            refused({**tiny_config("llama"), inside: {field: value}}, f"{inside}.{field}", kind)
    nested = {"rope_parameters": {"full_attention": {"rope_theta": 0}}}
    refused({**tiny_config("gemma3"), **nested}, "rope_parameters.full_attention.rope_theta", ROPE_KINDS["rope_theta"])


def refused(config: dict[str, Any], field: str, kind: Kind) -> None:
    with pytest.raises(UserError, match=rf"\b{re.escape(field)} = .* must be {re.escape(kind.what)}") as error:
        ModelMap.from_hf(config)
    assert len(str(error.value)) < 200 and "\n" not in str(error.value)


def test_a_type_that_is_not_the_architectures_is_refused() -> None:
    config = tiny_config("qwen3")
    for kind in ("llama", "kimi", 3, ["qwen3"]):
        with pytest.raises(
            UserError, match=r"model_type = .* and architectures = \['Qwen3ForCausalLM'\] disagree: .*'qwen3'"
        ):
            ModelMap.from_hf({**config, "model_type": kind})
    del config["model_type"]
    ModelMap.from_hf(config)
    ModelMap.from_hf({**config, "model_type": "kimi", "auto_map": {}})  # code of its own
    with pytest.raises(UserError, match="disagree"):
        ModelMap.from_hf({**config, "model_type": "llama", "auto_map": {}})
    with pytest.raises(UserError, match="names models of more than one family"):
        ModelMap.from_hf({**config, "architectures": ["Qwen3ForCausalLM", "LlamaForCausalLM"]})


def test_all_that_is_wrong_is_said_at_once() -> None:
    config = {
        **tiny_config("qwen3"),
        "rms_norm_eps": -1,
        "tie_word_embeddings": "false",
        "rope_theta": 0,
        "surprise": 1,
    }
    with pytest.raises(UserError) as error:
        ModelMap.from_hf(config)
    assert str(error.value) == (
        "config.json of a Qwen3ForCausalLM: the field surprise = 1 is not understood; rms_norm_eps = -1 must be a finite number "
        "above 0; rope_theta = 0 must be a finite number above 0, or null; tie_word_embeddings = 'false' must be true or false."
    )


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt-oss", {"num_experts_per_tok": 11}, "num_experts_per_tok = 11 is more than the 10 experts there are"),
        ("qwen3-moe", {"num_experts_per_tok": 11}, "num_experts_per_tok = 11 is more than the 10 experts there are"),
        ("deepseek", {"num_experts_per_tok": 50}, "num_experts_per_tok = 50 is more than the 12 experts there are"),
        ("deepseek-v2", {"num_experts_per_tok": 50}, "num_experts_per_tok = 50 is more than the 12 experts there are"),
        ("deepseek", {"n_group": 5, "topk_group": 2}, "n_group = 5 must cut 12 experts into equal groups of 2 or more"),
        ("deepseek", {"n_routed_experts": 13}, "n_routed_experts = 13 and num_experts = 12 are names of one thing"),
        ("gpt-oss", {"num_local_experts": 12}, "num_local_experts = 12 and num_experts = 10 are names of one thing"),
    ],
)
def test_experts_are_counted_under_any_name(family: str, changes: dict[str, Any], words: str) -> None:
    config = tiny_config(family)
    names = [name for name in EXPERTS if name in families()[config["architectures"][0]].understands]
    config[names[-1]] = config.pop(next(name for name in names if name in config))
    ModelMap.from_hf(config)
    with pytest.raises(UserError, match=words):
        ModelMap.from_hf({**config, **changes})


def test_two_names_of_one_thing_must_agree() -> None:
    for family, names in (("gemma3", ("sliding_window_pattern", "_sliding_window_pattern")), ("glm4-moe", MTP)):
        with pytest.raises(UserError, match=f"{names[0]} = 1 and {names[1]} = 2 are names of one thing and disagree"):
            ModelMap.from_hf({**tiny_config(family), names[0]: 1, names[1]: 2})


@pytest.mark.parametrize(
    ("family", "says", "words"),
    [
        ("llama", {"rope_scaling": {"type": "linear", "factor": None}}, "rope scaling of kind 'linear' lacks factor"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": None}}, "of kind 'llama3' lacks factor"),
        ("glm4", {"partial_rotary_factor": None}, "partial_rotary_factor = None must be a finite number above 0"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": 3}},
            "rope_parameters.full_attention = 3 must be an object, or null",
        ),
        ("deepseek", {"num_hidden_layers": 10**400}, "num_hidden_layers = 1000"),
        ("deepseek", {"first_k_dense_replace": 10**400}, "first_k_dense_replace = 1000"),
        ("qwen3", {f"field{i}": i for i in range(500)}, "the field field7 = 7 is not understood; and 492 more."),
        ("qwen3", {"x" * 4000: 3}, "the field xxx"),
        ("qwen3", {"architectures": ["x" * 4000]}, "The model is a xxx"),
        ("qwen3", {"model_type": "x" * 4000}, "model_type = 'xxx"),
        ("qwen3", {"rope_scaling": {"rope_type": "x" * 4000, "y": "y" * 4000}}, "rope scaling of kind 'xxx"),
        ("qwen3-moe", {"mlp_only_layers": False}, "mlp_only_layers = False must be a list of layer numbers"),
        ("qwen3-moe", {"mlp_only_layers": [True]}, "mlp_only_layers = [True] must be a list of layer numbers"),
        ("qwen3", {"rope_scaling": {"rope_type": ""}}, "rope_scaling.rope_type = '' must be a name, or null"),
        (
            "gpt-oss",
            {"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 32}},
            "beta_fast = 1 must not be below beta_slow = 32",
        ),
        ("qwen3-moe", {"mlp_only_layers": ["x" * 4000]}, "mlp_only_layers = "),
        ("gemma3", {"layer_types": ["x"] * 4000}, "layer_types = "),
        ("gemma3", {"rope_parameters": {"x" * 4000: {}}}, "rope_parameters = "),
    ],
)
def test_sentences_name_the_field_and_stay_short(family: str, says: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)) as error:
        ModelMap.from_hf({**tiny_config(family), **says})
    assert len(str(error.value)) < 500


def test_a_base_of_null_is_the_usual_one() -> None:
    config = {key: value for key, value in tiny_config("gemma3").items() if "rope" not in key}
    usual = ModelMap.from_hf(config).arithmetic()
    nulls = {"full_attention": {"rope_theta": None}, "sliding_attention": {"rope_theta": None}}
    for says in ({"rope_theta": None}, {"rope_parameters": nulls}):
        assert ModelMap.from_hf({**config, **says}).arithmetic() == usual


def test_an_unknown_classifier_is_told_by_its_own_name() -> None:
    for name in ("Qwen3ForRewardModel", "Qwen3Model"):
        with pytest.raises(UserError, match=f"The model is a {name}; megarl knows"):
            ModelMap.from_hf({**tiny_config("qwen3"), "architectures": [name]}, Head())
