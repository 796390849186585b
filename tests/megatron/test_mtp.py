"""Layers for multi-token prediction under the names of Megatron's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.bridge.model_map import ModelMap
from megarl.convert.hf_to_megatron import hf_to_megatron
from megarl.convert.megatron_to_hf import megatron_to_hf
from megarl.models.tiny import random_weights, tiny_config
from tests.bridge.full_size import MTP_NAMES
from tests.distributed import free_port, run_ranks
from tests.megatron.harness import Layout
from tests.megatron.mtp_jobs import read_and_write

LAYOUTS = {
    "one rank": Layout(),
    "tp2 sp": Layout(tensor=2, sequence=True, expert_tensor=2),
    "pp2": Layout(pipeline=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek", "glm4-moe"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_reads_and_writes_them(family: str, layout: str, tmp_path: Path) -> None:
    config = tiny_config(family, num_nextn_predict_layers=1)
    map_ = ModelMap.from_hf(config, names=MTP_NAMES)
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(random_weights(map_.hf_shapes, 1))
    save_file(weights, folder / "model.safetensors")
    checkpoint = hf_to_megatron(folder, tmp_path / "checkpoint", show=False)
    theirs, on = tmp_path / "theirs", LAYOUTS[layout]
    answers = run_ranks(on.world, read_and_write, on, str(folder), str(checkpoint), str(theirs), free_port())
    assert [wrong for _, wrong in answers] == [[]] * on.world
    copies = {"mtp.layers.0.embed_tokens.weight", "mtp.layers.0.shared_head.head.weight"}
    wanted = {parameter.name for parameter in map_.parameters if parameter.stage == "mtp"} - copies
    assert {name for met, _ in answers for name in met} == wanted
    # What Megatron writes has no copies, and neither has the folder that is made of it.
    back = load_file(megatron_to_hf(theirs, tmp_path / "back", config=folder, show=False) / "model.safetensors")
    left = {name for name in weights if "layers.4.embed_tokens" in name or "shared_head.head" in name}
    assert len(left) == 2
    assert back.keys() == weights.keys() - left
    assert all(torch.equal(tensor, weights[name]) for name, tensor in back.items())
