"""Quantised checkpoints are read as transformers reads them, to the bit, whole and in regions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.bridge.hf_io import load_parameter
from megarl.bridge.layout import Cut
from megarl.bridge.model_map import ModelMap
from megarl.bridge.quantised import QuantisedReader, method, plain
from megarl.errors import UserError
from megarl.models.tiny import random_weights, tiny_config
from tests.bridge.full_size import MTP_NAMES

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 16]}


def gpt_oss(folder: Path) -> Path:
    """With experts as the published model has them, every bit pattern of the numbers, scales of 2^-7 to 2^2; the rest in bfloat16."""
    config = tiny_config("gpt-oss", hidden_size=96, intermediate_size=64, quantization_config=MXFP4)
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for name, tensor in random_weights(ModelMap.from_hf(plain(config)).hf_shapes, 5):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor.bfloat16()
            continue
        experts, columns, rows = tensor.shape
        shape = (experts, rows, columns // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 130, shape[:3], generator=generator, dtype=torch.uint8)
    return folder_of(config, tensors, folder)


def deepseek(folder: Path) -> Path:
    """Matrices that divide by no block, the layer for multi-token prediction among them; what is no layer's is not quantised."""
    config = tiny_config("deepseek", num_nextn_predict_layers=1, quantization_config=FP8)
    generator = torch.Generator().manual_seed(4)
    tensors: dict[str, Tensor] = {}
    for name, tensor in random_weights(ModelMap.from_hf(plain(config), names=MTP_NAMES).hf_shapes, 6):
        kept = tensor.dim() == 1 or not name.startswith("model.layers.") or "mlp.gate." in name
        if kept or name.endswith(("eh_proj.weight", "embed_tokens.weight", "shared_head.head.weight")):
            tensors[name] = tensor if name.endswith("correction_bias") else tensor.bfloat16()
            continue
        rows, columns = tensor.shape
        tensors[name] = tensor.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.rand((-(-rows // 32), -(-columns // 16)), generator=generator) + 0.1
    return folder_of(config, tensors, folder)


def folder_of(config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def reader_of(folder: Path) -> tuple[QuantisedReader, ModelMap]:
    config = json.loads((folder / "config.json").read_text())
    reader = QuantisedReader(folder, config)
    model = ModelMap.from_hf(plain(config), names=reader.names)
    reader.check(model)
    return reader, model


def by_transformers(folder: Path) -> dict[str, Tensor]:
    """Every tensor as the functions of transformers make it, which are asked for each by itself."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, found = load_file(folder / "model.safetensors"), {}
    for name, tensor in stored.items():
        if name.endswith("_blocks"):
            scales = stored[name.replace("_blocks", "_scales")]
            found[name.removesuffix("_blocks")] = convert_moe_packed_tensors(tensor, scales)
        elif tensor.dtype == torch.float8_e4m3fn:
            found[name] = blockwise(tensor, stored[f"{name}_scale_inv"])
        elif not name.endswith(("_scales", "_scale_inv")):
            found[name] = tensor
    return found


def blockwise(numbers: Tensor, scales: Tensor) -> Tensor:
    """transformers' takes matrices of whole blocks only: filled up with zeros, which are cut off again."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rows, columns = numbers.shape
    whole = torch.zeros(scales.shape[0] * 32, scales.shape[1] * 16, dtype=torch.uint8)
    whole[:rows, :columns] = numbers.view(torch.uint8)
    made = Fp8Dequantize(None)._dequantize_one(whole.view(torch.float8_e4m3fn), scales, torch.bfloat16)
    return made[:rows, :columns]


@pytest.mark.parametrize("make", [gpt_oss, deepseek])
def test_weights_are_those_of_transformers(make: Any, tmp_path: Path) -> None:
    reader, model = reader_of(make(tmp_path / "hf"))
    want = by_transformers(tmp_path / "hf")
    assert set(reader.names) == set(want) == set(model.hf_shapes)
    for name, tensor in want.items():
        got = reader.get(name)
        assert reader.dtype(name) == got.dtype == tensor.dtype
        assert torch.equal(got.view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("make", [gpt_oss, deepseek])
def test_every_region_is_that_of_the_whole(make: Any, tmp_path: Path) -> None:
    reader, model = reader_of(make(tmp_path / "hf"))
    for name, shape in list(model.hf_shapes.items())[::3]:
        whole = reader.get(name)
        for low, high in ((3, 5), (2, 1), (17, 2)):
            region = tuple(slice(size // low, max(size // low + 1, size - size // high)) for size in shape)
            assert torch.equal(reader.get_slice(name, region), whole[region]), (name, region)
            out = torch.zeros(whole[region].shape)
            reader.read(name, region, out)
            assert torch.equal(out, whole[region].float())
    # What a rank holds of experts: every other row, and a share of them.
    cut = Cut(expert=1, expert_size=2, tensor_size=2, tensor=1)
    some = [p for p in model.parameters if p.expert is not None and p.held(cut) and p.layer in (1, 2)][::3]
    for parameter in some:
        out = torch.empty(parameter.local_shape(cut), dtype=torch.bfloat16)
        load_parameter(reader, parameter, cut, out)
        for copy in parameter.copies(cut):
            assert torch.equal(out[copy.local], copy.of(reader.get(copy.hf_name)[copy.hf]))


def test_scales_may_be_as_small_and_as_large_as_they_can_be_written() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from megarl.bridge.quantised import _numbers

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(255, 16, 1, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1, 1).expand(255, 16, 1).contiguous()
    want = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    for exponent in range(255):
        got = _numbers(blocks[exponent], scales[exponent])
        assert torch.equal(got.view(torch.int16), want[exponent].contiguous().view(torch.int16)), exponent


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    assert method({}) is None and method({"quantization_config": None}) is None
    for said, words in (
        ([], r"quantization_config = \[\] must be an object"),
        ("fp8", "quantization_config = 'fp8' must be an object"),
        ({"quant_method": "gptq"}, "quantised by 'gptq' cannot be read, only by mxfp4 or fp8"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "format 'e5m2'"),
        ("awq", "'awq'"),
        ({"bits": 4}, "None cannot be read"),
    ):
        with pytest.raises(UserError, match=words):
            method({"quantization_config": said})
    folder = deepseek(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    for size in (None, [32], [0, 16], [32, 16, 4]):
        with pytest.raises(UserError, match="weight_block_size"):
            QuantisedReader(folder, {"quantization_config": {**FP8, "weight_block_size": size}})
    with pytest.raises(UserError, match=r"are no quantised weights: their shapes are .* with blocks of \(64, 16\)"):
        QuantisedReader(folder, {"quantization_config": {**FP8, "weight_block_size": [64, 16]}})
    with pytest.raises(UserError, match="the weights are quantised: give the unquantised checkpoint"):
        ModelMap.from_hf(config)
    folder = gpt_oss(tmp_path / "oss")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    for change, words in (
        ({f"{name}_scales": tensors[f"{name}_scales"].float()}, "stored as U8 and F32, not as U8"),
        ({f"{name}_scales": tensors[f"{name}_scales"][:1].contiguous()}, "their shapes are"),
    ):
        save_file({**tensors, **change}, folder / "model.safetensors")
        with pytest.raises(UserError, match=words):
            reader_of(folder)
    save_file({key: t for key, t in tensors.items() if key != f"{name}_scales"}, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"lacks {name}"):
        reader_of(folder)
