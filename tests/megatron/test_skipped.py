"""A gradient that is not finite changes nothing, and the samples it came from are named, on every layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megarl.algorithms import denominators
from megarl.batch import Level
from megarl.config import schema
from megarl.models.tiny import make_tiny
from tests.distributed import free_port, run_ranks
from tests.megatron.harness import Layout, random_batch
from tests.megatron.layouts import OBJECTIVE

LAYOUTS = {
    "dp2": Layout(data=2, micro_batch_tokens=30),
    "tp2": Layout(tensor=2),
    "pp2 vpp2": Layout(pipeline=2, virtual=2, micro_batch_tokens=30),
    "cp2": Layout(context=2, micro_batch_tokens=30),
}
SPOILT = (3, 8)  # 4, too, has such a value, but where it is masked


@dataclass(frozen=True)
class Found:
    data: int
    metrics: dict
    changed: bool
    again: float


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    folder = str(make_tiny("qwen3", tmp_path_factory.mktemp("skipped") / "model"))
    ranks = run_ranks(2, _train, folder, [(layout, free_port()) for layout in LAYOUTS.values()])
    return {name: [rank[at] for rank in ranks] for at, name in enumerate(LAYOUTS)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_samples_are_named_and_nothing_is_changed(found: dict[str, list[Found]], name: str) -> None:
    for rank in found[name]:
        own = range(12) if LAYOUTS[name].data == 1 else range(rank.data, 12, 2)
        assert [own[i] for i in rank.metrics["offending"]] == [i for i in SPOILT if i in own]
        assert rank.metrics["applied"] == 0.0 and not rank.changed
        assert rank.again == 1.0  # the next update, of samples that are sound, is applied


def _train(rank: int, world: int, port: int, folder: str, jobs: list) -> list[Found]:
    torch.set_num_threads(1)
    return [_one(rank, world, folder, *job) for job in jobs]


def _one(rank: int, world: int, folder: str, layout: Layout, port: int) -> Found:
    from megarl.megatron import parallel
    from megarl.megatron.engine import EngineSettings, MegatronEngine

    sizes = {name: getattr(layout, name) for name in ("tensor", "pipeline", "context", "virtual")}
    place = parallel.start(rank, world, "127.0.0.1", port, **sizes, seed=1, timeout=120)
    settings = EngineSettings("float32", micro_batch_tokens=layout.micro_batch_tokens)
    engine = MegatronEngine(Path(folder), place, settings, optimizer=schema.OptimizerConfig(lr=1e-2), total_updates=5)
    batch = random_batch(engine.map.dims.vocab)
    size = int(batch.response_lengths.sum())
    g = torch.Generator().manual_seed(1)
    advantages = torch.randn(size, generator=g)
    batch = batch.set("advantages", advantages, Level.RESPONSE)
    batch = batch.set("old_log_probs", torch.full((size,), -6.0), Level.RESPONSE)
    ends = batch.response_lengths.cumsum(0)
    mask, spoilt = torch.as_tensor(batch["loss_mask"]).clone(), advantages.clone()
    for sample, masked in ((SPOILT[0], 1.0), (4, 0.0), (SPOILT[1], 1.0)):
        mask[ends[sample] - 1], spoilt[ends[sample] - 1] = masked, torch.inf
    batch = batch.set("loss_mask", mask, Level.RESPONSE)
    total = denominators(batch.padded("loss_mask"))
    mine = torch.arange(place.data, 12, place.data_size)

    before = [tensor.detach().clone() for _, tensor in engine.parameters()]
    metrics = engine.train(batch.set("advantages", spoilt, Level.RESPONSE).take(mine), OBJECTIVE, total)
    changed = any(not torch.equal(a, b) for a, (_, b) in zip(before, engine.parameters(), strict=True))
    again = engine.train(batch.take(mine), OBJECTIVE, total)
    parallel.stop()
    return Found(place.data, metrics, changed, again["applied"])
