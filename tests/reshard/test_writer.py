"""Which rank answers for what: over all ranks of a grid every element of the checkpoint once, with the right numbers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megarl.bridge.model_map import ModelMap
from megarl.models.tiny import tiny_config
from megarl.reshard.fingerprint import combine, partial
from megarl.reshard.transfer import plan
from megarl.reshard.writer import ShardWriter
from tests.bridge.cases import numbered
from tests.reshard.receiver import Exposing


@dataclass(frozen=True)
class Rank:
    """A rank's place, worked out from its number as Megatron deals ranks out: tensor, context, data, pipeline."""

    rank: int
    world: int
    tensor_size: int = 1
    context_size: int = 1
    pipeline_size: int = 1
    expert_size: int = 1
    expert_tensor_size: int = 1

    @property
    def data_size(self) -> int:
        return self.world // (self.tensor_size * self.context_size * self.pipeline_size)

    @property
    def tensor(self) -> int:
        return self.rank % self.tensor_size

    @property
    def context(self) -> int:
        return self.rank // self.tensor_size % self.context_size

    @property
    def data(self) -> int:
        return self.rank // (self.tensor_size * self.context_size) % self.data_size

    @property
    def pipeline(self) -> int:
        return self.rank // (self.world // self.pipeline_size)

    @property
    def _in_stage(self) -> int:
        return self.rank % (self.world // self.pipeline_size)

    @property
    def expert_tensor(self) -> int:
        return self._in_stage % self.expert_tensor_size

    @property
    def expert(self) -> int:
        return self._in_stage // self.expert_tensor_size % self.expert_size

    @property
    def expert_data(self) -> int:
        return self._in_stage // (self.expert_tensor_size * self.expert_size)


GRIDS = {
    "one rank": {"world": 1},
    "tp2 dp2": {"world": 4, "tensor_size": 2, "expert_tensor_size": 2},
    "tp2 cp2": {"world": 4, "tensor_size": 2, "context_size": 2, "expert_tensor_size": 2},
    "dp4 ep2": {"world": 4, "expert_size": 2},
    "tp2 dp2 ep2, experts whole": {"world": 4, "tensor_size": 2, "expert_size": 2},
    "tp2 dp4 pp2 ep2, experts cut": {
        "world": 16,
        "tensor_size": 2,
        "pipeline_size": 2,
        "expert_size": 2,
        "expert_tensor_size": 2,
    },
    "dp2, experts cut": {"world": 2, "expert_tensor_size": 2},
}


def shards(model: ModelMap, checkpoint: dict[str, Tensor], rank: Rank) -> list[tuple]:
    """What a rank holds, as `engine.parameters()` would list it."""
    half = model.dims.layers // rank.pipeline_size
    found = []
    for parameter in model.parameters:
        stage = {"first": 0, "last": rank.pipeline_size - 1}.get(parameter.stage, (parameter.layer or 0) // half)
        if stage != rank.pipeline or not parameter.held(rank):
            continue
        local = torch.zeros(parameter.local_shape(rank), dtype=torch.float64)
        for copy in parameter.copies(rank):
            local[copy.local] = copy.of(checkpoint[copy.hf_name][copy.hf]).double()
        found.append((parameter, local))
    return found


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "deepseek", "gpt-oss"])
@pytest.mark.parametrize("grid", GRIDS)
def test_every_element_is_answered_for_once(grid: str, family: str) -> None:
    model = ModelMap.from_hf(tiny_config(family))
    checkpoint = numbered(model)
    met = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in model.hf_shapes.items()}
    shares: dict[str, list[int]] = {name: [] for name in model.hf_shapes}
    busy = []
    for number in range(GRIDS[grid]["world"]):
        rank = Rank(number, **GRIDS[grid])
        writer = ShardWriter(shards(model, checkpoint, rank), rank)  # type: ignore[arg-type]
        busy.append(sum(len(pieces) for pieces in writer._slices.values()))
        for name, pieces in writer._slices.items():
            for piece in pieces:
                met[name][piece.copy.hf] += 1
                assert torch.equal(
                    piece.copy.back(piece.tensor[piece.copy.local]), checkpoint[name][piece.copy.hf].double()
                )
        for name, share in writer.shares(dict.fromkeys(model.hf_shapes, "float32")).items():
            shares[name].append(share)
    assert all(bool((count == 1).all()) for count in met.values())
    assert min(busy) > 0  # nobody is idle
    for name, tensor in checkpoint.items():
        whole = combine([partial(tensor.double().float(), [0] * tensor.dim())])
        assert combine(shares[name]) == whole, name


def test_parameters_that_were_given_another_storage_are_written_from_there() -> None:
    """Into buckets, as messages, for fingerprints, and straight into an engine whose weights were mapped before."""
    model = ModelMap.from_hf(tiny_config("qwen3"))
    rank = Rank(0, 1)
    held = [(parameter, tensor.float()) for parameter, tensor in shards(model, numbered(model), rank)]
    writer, engine = ShardWriter(held, rank), Exposing()  # type: ignore[arg-type]
    bucket = plan(model, torch.float32, 1 << 30)[0]
    exposures = [engine._expose(bucket.tensors, number) for number in range(2)]
    writer.open({(0, 1): exposures})
    before = writer.shares(dict.fromkeys(model.hf_shapes, "float32"))
    for _, tensor in held:
        tensor.data = tensor.data + 1
    writer.write_in_place([(0, 1)])
    shares = writer.shares(dict.fromkeys(model.hf_shapes, "float32"))
    for name, pieces in writer._slices.items():
        assert shares[name] != before[name], name
        whole = torch.zeros(model.hf_shapes[name])
        for piece in pieces:
            whole[piece.copy.hf] = piece.copy.back(piece.tensor[piece.copy.local])
        for exposure in exposures:
            spot = exposure.spots[name]
            region = tuple(slice(at, at + size) for at, size in zip(spot.origin, spot.shape, strict=True))
            assert torch.equal(exposure.views()[name], whole[region]), name
