"""Weights that engines get in float8: from any layout over every transport the bytes of the whole matrices, quantised."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.bridge import fp8
from megarl.bridge.model_map import ModelMap
from megarl.bridge.quantised import QuantisedReader, plain
from megarl.errors import RunError
from megarl.models.tiny import tiny_config
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.fingerprint import combine, fingerprint
from megarl.reshard.transfer import plan
from megarl.reshard.writer import ShardWriter
from tests.reshard.ranks import LAYOUTS
from tests.reshard.receiver import Receiver
from tests.reshard.test_transfer import TRANSPORTS, transfer
from tests.reshard.test_writer import GRIDS, Rank, shards

__all__ = ["transfer"]  # a fixture
UP = "model.layers.2.mlp.up_proj.weight"


def expected(model: ModelMap, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """What an engine is to be given, of tensors that nobody has cut."""
    found, quantised = {}, fp8.quantised(model)
    assert quantised
    for name, tensor in tensors.items():
        if name in quantised:
            scales = fp8.scales_of(fp8.magnitudes(tensor, (0, 0))[1])
            found |= {name: fp8.quantise(tensor, (0, 0), scales), fp8.scales_name(name): scales}
        else:
            found[name] = tensor.to(torch.float32 if name in model.float32 else dtype)
    return found


def same(got: Tensor, want: Tensor) -> bool:
    return got.dtype == want.dtype and torch.equal(
        got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_every_layout_gives_the_bytes_of_the_whole(transfer, ranks, folder, kind: str, layout: str) -> None:
    """Twice, with other weights the second time; an engine's second update must not go straight into its weights."""
    source, receiver = folder(layout), Receiver()
    model, group = ModelMap.from_hf(source), ranks(layout)
    moving = transfer(kind, source, dtype="bfloat16", quantised=True)
    want = expected(model, load_file(source / "model.safetensors"))
    report = moving.push(group, receiver, 1)
    assert report.verified == report.tensors == len(want) == len(receiver.arrivals)
    assert all(same(receiver.tensors[name], tensor) for name, tensor in want.items())
    try:
        group.change()
        moving.push(group, receiver, 2)
    finally:
        group.restore()
    changed = [name for name in fp8.quantised(model) if not same(receiver.tensors[name], want[name])]
    assert len(changed) == len(fp8.quantised(model))


def test_a_folder_is_a_checkpoint_in_float8(transfer, ranks, folder, tmp_path: Path) -> None:
    """As the bridge and transformers read the published ones."""
    from transformers import AutoConfig

    source = folder("tp2")
    transfer("disk", source, dtype="bfloat16", quantised=True).push(ranks("tp2"), Receiver(), 1)
    written = tmp_path / "weights/version-1"
    said = AutoConfig.from_pretrained(written).quantization_config
    assert said["quant_method"] == "fp8" and said["weight_block_size"] == [128, 128]
    config = json.loads((written / "config.json").read_text())
    reader = QuantisedReader(written, config)
    model = ModelMap.from_hf(plain(config), names=reader.names)
    reader.check(model)
    for name, tensor in load_file(source / "model.safetensors").items():
        got = reader.get(name)
        assert got.dtype == torch.bfloat16
        if name in fp8.quantised(
            model
        ):  # half a step of a number from half of 448 on is its 32nd part, and bfloat16's rounding
            error = (got.float() - tensor).abs()
            assert 0 < error.max() <= tensor.abs().max() * (16 / 448 + 2**-8), name
        else:
            assert torch.equal(got, tensor.bfloat16()), name


def test_a_scale_that_did_not_arrive_is_named(transfer, ranks, folder) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[fp8.scales_name(UP)][0, 0] *= 1.0001

    with pytest.raises(RunError, match=f"weight sync: {fp8.scales_name(UP)} in engine 0 differs"):
        transfer("colocated", folder("pp2"), quantised=True).push(ranks("pp2"), Receiver(spoil), 1)


SIZES = {
    "qwen3": {"hidden_size": 152, "intermediate_size": 392, "head_dim": 56},
    "qwen3-moe": {"hidden_size": 152, "intermediate_size": 200, "moe_intermediate_size": 264, "head_dim": 56},
}


def writers(family: str, grid: str) -> tuple[ModelMap, dict[str, Tensor], list[ShardWriter]]:
    """Of several blocks a matrix, which parts of ranks, and of heads in a rank, cut anywhere."""
    model = ModelMap.from_hf(tiny_config(family, num_hidden_layers=2, **SIZES[family]))
    generator = torch.Generator().manual_seed(7)
    checkpoint = {name: torch.randn(shape, generator=generator) for name, shape in model.hf_shapes.items()}
    checkpoint[next(iter(fp8.quantised(model)))][:130, :128] = 0
    made = []
    for number in range(GRIDS[grid]["world"]):
        rank = Rank(number, **GRIDS[grid])
        held = [(parameter, tensor.float()) for parameter, tensor in shards(model, checkpoint, rank)]
        made.append(ShardWriter(held, rank))  # type: ignore[arg-type]
    return model, checkpoint, made


def measure(model: ModelMap, made: list[ShardWriter]) -> None:
    """What ranks do in processes of their own at the same time."""
    found: list[Tensor] = []
    shapes = fp8.quantised(model)
    for writer in made:
        writer.measure(shapes, lambda tensor: found.append(tensor.clone()))
    largest = torch.stack(found).amax(0)
    for writer in made:
        writer.measure(shapes, lambda tensor: tensor.copy_(largest))


@pytest.mark.parametrize(("family", "grid"), [("qwen3-moe", grid) for grid in GRIDS] + [("qwen3", "tp2 dp2")])
def test_blocks_that_several_ranks_have_a_part_of(family: str, grid: str, tmp_path: Path) -> None:
    model, checkpoint, made = writers(family, grid)
    measure(model, made)
    (bucket,) = plan(model, torch.bfloat16, 1 << 30, fp8.quantised(model))
    names = tuple(item.name for item in bucket.tensors)
    spec = BucketSpec(str(tmp_path / "bucket"), bucket.tensors, names)
    spec.create()
    views = spec.views()
    for view in views.values():
        view.view(torch.uint8).fill_(0xFF)
    shares = [writer.write(spec) for writer in made]
    want = expected(model, checkpoint)
    assert views.keys() == want.keys()
    for name, tensor in want.items():
        assert same(views[name], tensor), name
        assert combine([share[name] for share in shares if name in share]) == fingerprint(tensor), name


def test_numbers_that_are_not_finite_are_named_on_every_rank() -> None:
    model, _, made = writers("qwen3", "tp2 dp2")
    name = "model.layers.1.mlp.down_proj.weight"
    (piece,) = made[0]._slices.get(name) or made[2]._slices[name]
    piece.tensor[3, 5] = float("nan")
    found: list[Tensor] = []
    said = []
    for writer in made:
        try:
            writer.measure(fp8.quantised(model), lambda tensor: found.append(tensor.clone()))
        except RunError:
            said.append("alone")
    largest = torch.stack(found).amax(0)
    for writer in made:
        with pytest.raises(RunError, match=f"weight sync: {name} has numbers that are not finite"):
            writer.measure(fp8.quantised(model), lambda tensor: tensor.copy_(largest))
    assert said == ["alone"]
