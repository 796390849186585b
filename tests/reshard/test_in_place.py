"""Weights that ranks write straight into those of an engine: bit-exact, by every layout, and what is wrong is named."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.bridge.model_map import ModelMap
from megarl.errors import RunError
from megarl.reshard.bucket import BucketTensor
from megarl.reshard.colocated import Colocated
from megarl.reshard.exposure import Exposure, Spot, meeting
from megarl.reshard.transfer import Member
from tests.reshard.ranks import FUSED, LAYOUTS
from tests.reshard.receiver import Exposing, Receiver
from tests.reshard.whole import Whole

FULL = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture
def transfer() -> Iterator[Callable[..., Colocated]]:
    made: list[Colocated] = []

    def make(source: Path, **options: Any) -> Colocated:
        settings = {"dtype": "float32", "bucket_bytes": 100_000, "verify": "full", "in_place": True} | options
        made.append(Colocated(ModelMap.from_hf(source), **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def held(moving: Colocated) -> int:
    return sum(512 * os.stat(path).st_blocks for path in moving.paths)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [*LAYOUTS, *FUSED])
def test_changed_weights_arrive_bit_exact(transfer, ranks, folder, layout: str, dtype: str) -> None:
    group, engine, other = ranks(layout), Exposing(), Receiver()
    moving, buckets = transfer(folder(layout), dtype=dtype), transfer(folder(layout), dtype=dtype, in_place=False)
    try:
        moving.push(group, engine, 1)
        assert engine.arrivals and held(moving) == 0  # the first came in buckets, which nobody needs any more
        group.change()
        report = moving.push(group, engine, 2)
        assert not engine.arrivals and engine.exposed == 1
        assert report.verified == report.tensors == len(engine.exposures[0].spots)
        buckets.push(group, other, 2)
        for name, region, view in engine._parts():
            assert torch.equal(view, other.tensors[name][region]), name
    finally:
        group.restore()


def test_an_engine_that_was_started_anew_takes_buckets_first(transfer, ranks, folder) -> None:
    moving, first, second = transfer(folder("tp2")), Exposing(0), Exposing(1)
    for engine in (first, second, first, second):
        moving.push(ranks("tp2"), engine, 1)
    assert (first.exposed, second.exposed) == (1, 1)
    first.starts += 1
    moving.push(ranks("tp2"), first, 2)
    assert first.arrivals and first.exposed == 2
    assert moving._open.keys() == {(0, 2), (1, 1)}  # whoever sat there before is let go of
    moving.push(ranks("tp2"), first, 3)
    assert not first.arrivals


def test_the_first_updates_of_both_kinds_are_proved_in_full(transfer, ranks, folder) -> None:
    moving, engine = transfer(folder("tp2"), verify="sampled"), Exposing()
    moving._turn = 5
    for whole in (True, True, False):
        report = moving.push(ranks("tp2"), engine, 1)
        assert (report.verified == report.tensors) == whole
    engine.starts += 1
    report = moving.push(ranks("tp2"), engine, 1)
    assert report.verified == report.tensors


class _Gone(Exposing):
    """Its weights cannot be mapped, and `lost`: since it is no more, which shows at the update's end."""

    lost = True

    def expose(self, tensors: Sequence[BucketTensor]) -> dict[Member, list[Exposure]]:
        found = super().expose(tensors)
        return {member: [replace(one, path=f"{one.path}9876") for one in ranks] for member, ranks in found.items()}

    def end_update(self, in_place: Sequence[str] | None = None) -> list[dict[str, int]]:
        self.number += self.lost
        return super().end_update(in_place)


def test_an_engine_that_is_lost_before_its_weights_are_mapped_is_its_group_s_to_replace(transfer, folder) -> None:
    moving, group, engine = transfer(folder("tp2")), Whole(folder("tp2")), _Gone()
    moving.push(group, engine, 1)
    assert not moving._open
    engine.lost = False
    with pytest.raises(RunError, match="cannot be mapped"):
        moving.push(group, engine, 2)
    assert not moving._open


def _swap(views: dict[str, Tensor]) -> None:
    one, other = views[FULL], views[FULL.replace("layers.2", "layers.1")]
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def _one_bit(views: dict[str, Tensor]) -> None:
    views[FULL].view(torch.int32)[17, 3] ^= 1


@pytest.mark.parametrize(
    ("fault", "named"),
    {_swap: r"model\.layers\.[12]\.mlp\.up_proj\.weight", _one_bit: FULL}.items(),
)
def test_what_is_wrong_in_the_engine_is_named(transfer, ranks, folder, fault: Callable, named: str) -> None:
    moving, engine = transfer(folder("tp2")), Exposing()
    moving.push(ranks("tp2"), engine, 1)
    engine.fault = fault  # type: ignore[method-assign]
    with pytest.raises(RunError, match=f"weight sync: {named} in engine 0 differs from the trainer's"):
        moving.push(ranks("tp2"), engine, 2)


def test_a_stale_slice_is_named(transfer, ranks, folder) -> None:
    moving, engine, group = transfer(folder("tp2")), Exposing(), ranks("tp2")
    try:
        moving.push(group, engine, 1)
        group.freeze(1, FULL)
        moving.push(group, engine, 2)  # not stale yet
        group.change()
        with pytest.raises(RunError, match=f"weight sync: {FULL} in engine 0 differs from the trainer's"):
            moving.push(group, engine, 3)
    finally:
        group.restore()


def test_bytes_that_no_rank_would_write_are_refused(transfer, ranks, folder) -> None:
    class Larger(Exposing):
        def _expose(self, tensors, rank):  # type: ignore[no-untyped-def]
            found = super()._expose(tensors, rank)
            spot = found.spots["model.norm.weight"]
            wider = spot._replace(shape=(spot.shape[0] + 1,))
            return Exposure(found.path, found.size, {**found.spots, "model.norm.weight": wider})

        def _parts(self):  # type: ignore[no-untyped-def]
            return iter(())

    with pytest.raises(RunError, match=r"weight sync: the ranks answer for \d+ of the \d+ bytes of engine 0's weights"):
        transfer(folder("tp2")).push(ranks("tp2"), Larger(), 1)


def test_weights_of_an_engine_that_is_gone_are_one_sentence(tmp_path: Path) -> None:
    exposure = Exposure(f"/proc/{os.getpid()}/fd/987654", 64, {"w": Spot("float32", (2,), (1,), 0, (0,))})
    assert Exposure.from_json(exposure.to_json()) == exposure
    (tmp_path / "other").write_bytes(bytes(64))  # a number that was used again
    with open(tmp_path / "other", "rb") as other:
        for path in (exposure.path, f"/proc/{os.getpid()}/fd/{other.fileno()}"):
            with pytest.raises(RunError, match=r"cannot be mapped: the engine is gone, .*reshard.in_place=false"):
                replace(exposure, path=path).views()
    assert (tmp_path / "other").read_bytes() == bytes(64)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_where_a_region_and_a_spot_meet(step: int) -> None:
    whole = torch.arange(20 * 11).view(20, 11)
    for start, stop, origin, size in itertools.product((0, 3, 8), (9, 16, 20), (0, 5, 9), (2, 7, 11)):
        region, spot = (slice(start, stop, step), slice(2, 11)), Spot("int64", (size, 6), (6, 1), 0, (origin, 0))
        part = whole[origin : origin + size, :6]
        expected = sorted(set(whole[region].flatten().tolist()) & set(part.flatten().tolist()))
        common = meeting(region, spot.origin, spot.shape)
        if common is None:
            assert not expected
            continue
        ours, theirs = common
        assert torch.equal(whole[region][ours], part[theirs])
        assert part[theirs].flatten().tolist() == expected
