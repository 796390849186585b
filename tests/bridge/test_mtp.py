"""Layers for multi-token prediction: in the map where a checkpoint has them, left out of the model that is trained."""

from __future__ import annotations

import json
import math
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.bridge.hf_io import HFReader, export_tensors, left_out, load_parameter, save_hf
from megarl.bridge.layout import Cut
from megarl.bridge.model_map import ModelMap
from megarl.errors import UserError
from megarl.models.tiny import random_weights, tiny_config
from tests.bridge.cases import numbered, ranks
from tests.bridge.full_size import DEEPSEEK_V3, MTP_NAMES

TWO = [name.replace("layers.0.", f"layers.{layer}.") for name in MTP_NAMES for layer in (0, 1)]
MODELS = {
    "deepseek": ModelMap.from_hf(tiny_config("deepseek", num_nextn_predict_layers=1), names=MTP_NAMES),
    "deepseek, two": ModelMap.from_hf(tiny_config("deepseek", num_nextn_predict_layers=2), names=TWO),
    "deepseek, tied": ModelMap.from_hf(
        tiny_config("deepseek", num_nextn_predict_layers=1, tie_word_embeddings=True), names=MTP_NAMES
    ),
    "glm4-moe": ModelMap.from_hf(tiny_config("glm4-moe", num_nextn_predict_layers=1), names=MTP_NAMES),
    "glm4-moe without copies": ModelMap.from_hf(
        tiny_config("glm4-moe", num_nextn_predict_layers=1), names=["model.layers.4.eh_proj.weight"]
    ),
}


def test_it_is_one_more_layer_and_what_joins_it() -> None:
    model, plain = MODELS["deepseek"], ModelMap.from_hf(tiny_config("deepseek"))
    added = {name.removeprefix("model.layers.4."): shape for name, shape in model.hf_shapes.items()}
    added = {name: shape for name, shape in added.items() if name not in plain.hf_shapes}
    last = {
        name.removeprefix("model.layers.3."): shape
        for name, shape in plain.hf_shapes.items()
        if name.startswith("model.layers.3.")
    }
    assert added == {
        **last,
        "enorm.weight": (96,),
        "hnorm.weight": (96,),
        "eh_proj.weight": (96, 192),
        "embed_tokens.weight": (419, 96),
        "shared_head.norm.weight": (96,),
        "shared_head.head.weight": (419, 96),
    }
    assert list(model.hf_shapes)[: len(plain.hf_shapes)] == list(plain.hf_shapes)
    names = {parameter.name for parameter in model.parameters if parameter.stage == "mtp"}
    assert "mtp.layers.0.transformer_layer.self_attention.linear_kv_up_proj.weight" in names
    assert "mtp.layers.0.transformer_layer.mlp.experts.local_experts.11.linear_fc2.weight" in names
    assert "mtp.layers.0.final_layernorm.weight" in names
    assert model.parameter("mtp.layers.0.transformer_layer.mlp.experts.linear_fc1.weight3").expert == 3
    assert not any(
        ".4.embed_tokens" in name or "shared_head.head" in name for name in MODELS["glm4-moe without copies"].hf_shapes
    )
    two = MODELS["deepseek, two"]
    assert two.parameter("mtp.layers.1.enorm.weight").hf_names == ("model.layers.5.enorm.weight",)
    assert two.transformer_config() == plain.transformer_config()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cut", [Cut(), Cut(tensor_size=2, expert_size=2, expert_tensor_size=2)], ids=["whole", "cut"])
def test_through_any_layout_every_element_comes_back(name: str, cut: Cut, tmp_path: Path) -> None:
    model = MODELS[name]
    checkpoint = {key: tensor.float() for key, tensor in numbered(model).items()}
    save_file(checkpoint, tmp_path / "model.safetensors")
    reader = HFReader(tmp_path)
    reader.check(model)
    held = {}
    for parameter in model.parameters:
        for where in ranks(cut):
            if parameter.held(where):
                held[parameter.name, where] = torch.empty(parameter.local_shape(where))
                load_parameter(reader, parameter, where, held[parameter.name, where])
    exported = dict(export_tensors(model, lambda parameter, where: held[parameter.name, where], cut))
    assert exported.keys() == checkpoint.keys()
    assert all(torch.equal(exported[key], checkpoint[key]) for key in checkpoint)


def test_a_model_that_is_trained_reads_over_them_and_over_nothing_else(tmp_path: Path) -> None:
    config = tiny_config("deepseek", num_nextn_predict_layers=1)
    whole, trained = MODELS["deepseek"], ModelMap.from_hf(config)
    assert trained.hf_shapes.keys() < whole.hf_shapes.keys()
    tensors = {name: torch.zeros(shape) for name, shape in whole.hf_shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    HFReader(tmp_path).check(trained)
    HFReader(tmp_path).check(whole)
    # One layer less in config.json is another model, and so is one of the layer's tensors less.
    with pytest.raises(UserError, match=r"holds model.layers.4\..* which no rule"):
        HFReader(tmp_path).check(ModelMap.from_hf({**config, "num_nextn_predict_layers": 0}))
    del tensors["model.layers.4.eh_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    reader = HFReader(tmp_path)
    with pytest.raises(UserError, match=r"lacks model.layers.4.eh_proj.weight"):
        reader.check(ModelMap.from_hf(config, names=reader.names))
    # As transformers saves the model.
    save_file({name: t for name, t in tensors.items() if not trained.leaves_out(name)}, tmp_path / "model.safetensors")
    reader = HFReader(tmp_path)
    reader.check(ModelMap.from_hf(config, names=reader.names))


def test_an_export_of_the_trained_model_carries_them_over(tmp_path: Path) -> None:
    config = tiny_config("deepseek", num_nextn_predict_layers=1)
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    before = dict(random_weights(MODELS["deepseek"].hf_shapes, 1))
    save_file(before, source / "model.safetensors")
    trained = ModelMap.from_hf(source)
    whole, rest = left_out(source, trained)
    learned = ((name, tensor + 1) for name, tensor in before.items() if name in trained.hf_shapes)
    tensors = chain(learned, rest)
    save_hf(tmp_path / "out", tensors, source, shapes=whole.hf_shapes, dtype=torch.bfloat16, float32=whole.float32)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        assert tensor.dtype == (torch.float32 if name.endswith("correction_bias") else torch.bfloat16)
        was = before[name] + 1 if name in trained.hf_shapes else before[name]
        assert torch.equal(tensor, was.to(tensor.dtype)), name
    # Where there are none, nothing is added.
    save_file({name: before[name] for name in trained.hf_shapes}, source / "model.safetensors")
    whole, rest = left_out(source, trained)
    assert list(rest) == [] and whole.hf_shapes == trained.hf_shapes


@pytest.mark.parametrize("family", ["deepseek", "glm4-moe"])
def test_an_absurd_count_is_refused(family: str) -> None:
    for count in (-1, True, "1", 10**9):
        with pytest.raises(UserError, match="num_nextn_predict_layers"):
            ModelMap.from_hf(tiny_config(family, num_nextn_predict_layers=count))


def test_they_are_many_parameters() -> None:
    """As DeepSeek-V3's own notes on its weights count them: 11.5 billion, and copies of the embedding and the output layer."""
    model = ModelMap.from_hf(DEEPSEEK_V3, names=MTP_NAMES)
    count = {
        name.removeprefix("model.layers.61."): math.prod(shape)
        for name, shape in model.hf_shapes.items()
        if name.startswith("model.layers.61.")
    }
    copies = count.pop("embed_tokens.weight") + count.pop("shared_head.head.weight")
    assert copies == 2 * 129280 * 7168
    assert sum(count.values()) == 11_610_068_224
