"""Buckets of which each rank has its own, in its device's memory: with a machine's memory in the place of a GPU's."""

from __future__ import annotations

import inspect
import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing import reductions

from megarl.bridge.model_map import ModelMap
from megarl.errors import RunError
from megarl.reshard import devices
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.colocated import Colocated
from tests.reshard.receiver import Receiver


@pytest.fixture
def colocated(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = []

    def make(folder: Path, device: str, notes: list[str]) -> Colocated:
        made.append(
            Colocated(
                ModelMap.from_hf(folder),
                dtype="float32",
                bucket_bytes=100_000,
                verify="full",
                device=device,
                note=notes.append,
                folder=tmp_path,
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert not os.listdir(tmp_path)


def _pushed(moving: Colocated, group, folder: Path, version: int, receiver: Receiver) -> None:  # type: ignore[no-untyped-def]
    moving.push(group, receiver, version)
    want = load_file(folder / "model.safetensors")
    assert all(torch.equal(receiver.tensors[name], tensor) for name, tensor in want.items())


@pytest.mark.parametrize("layout", ["tp2", "pp2", "ep2"])
def test_each_rank_has_all_of_what_all_have_written(colocated, ranks, folder, tmp_path, layout: str) -> None:
    notes: list[str] = []
    moving, receiver = colocated(folder(layout), "host", notes), Receiver()
    _pushed(moving, ranks(layout), folder(layout), 1, receiver)
    handles = {name: (tmp_path / name).stat().st_ino for name in os.listdir(tmp_path) if "control" not in name}
    assert len(handles) == 2 and all(name.endswith("-the-host") for name in handles)  # no bucket in the host's own way
    _pushed(moving, ranks(layout), folder(layout), 2, receiver)
    assert not notes and all((tmp_path / name).stat().st_ino == inode for name, inode in handles.items())


def test_a_stale_byte_of_another_rank_is_not_left_in_a_bucket(colocated, ranks, folder) -> None:
    """Buckets hold the last ones' bytes, to which sums would add."""
    moving, receiver = colocated(folder("tp2"), "host", []), Receiver()
    _pushed(moving, ranks("tp2"), folder("tp2"), 1, receiver)
    ranks("tp2").change()
    try:
        report = moving.push(ranks("tp2"), receiver, 2)
        assert report.verified == report.tensors
    finally:
        ranks("tp2").restore()


class _Elsewhere(Receiver):
    def reach(self, kind: str, paths) -> list[str]:  # type: ignore[no-untyped-def]
        return ["no rank of the trainer is on the same GPU"]


@pytest.mark.parametrize(
    ("device", "receiver", "why"),
    [("host", _Elsewhere, "no rank of the trainer is on the same GPU"), ("cuda", Receiver, "CUDA|NVIDIA")],
)
def test_host_memory_serves_where_devices_cannot(colocated, ranks, folder, tmp_path, device, receiver, why) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("CUDA is here")
    notes: list[str] = []
    moving, engine = colocated(folder("tp2"), device, notes), receiver()
    for version in (1, 2):
        _pushed(moving, ranks("tp2"), folder("tp2"), version, engine)
    (note,) = notes  # told once
    assert note.startswith("weights go through the host's memory, not through the GPUs': ")
    assert re.search(why, note)


def test_an_engine_that_is_started_anew_opens_the_buckets_before_it_loads(colocated, ranks, folder) -> None:
    class Anew(Receiver):
        starts, reached = 1, 0

        def members(self):  # type: ignore[no-untyped-def]
            return ((0, self.starts),)

        def reach(self, kind, paths):  # type: ignore[no-untyped-def]
            self.reached += 1
            return super().reach(kind, paths)

    moving, engine = colocated(folder("tp2"), "host", []), Anew()
    for engine.starts, reached in ((1, 1), (1, 1), (2, 2)):
        _pushed(moving, ranks("tp2"), folder("tp2"), 1, engine)
        assert engine.reached == reached


def test_a_bucket_of_another_run_is_opened_in_its_place(tmp_path: Path) -> None:
    """Under the same path. And without a bucket it is said what is missing."""
    path = str(tmp_path / "bucket")
    with pytest.raises(RunError, match="no rank of the trainer is on the same GPU"):
        devices.memory("host", path)
    for value in (1, 2):
        data, handle = devices.KINDS["host"].make(8)
        data.fill_(value)
        written = tmp_path / f"new-{value}"
        written.write_bytes(handle)
        written.replace(tmp_path / "bucket-the-host")
        assert devices.memory("host", path).tolist() == [value] * 8
        spec = BucketSpec.plan(path, [("weight", torch.uint8, (8,))])
        there = BucketSpec.from_json(json.dumps(vars(spec) | {"device": "host"}))
        assert there.views()["weight"].tolist() == [value] * 8


def test_where_torch_has_the_number_of_a_device() -> None:
    arguments = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert arguments[devices._DEVICE] == "storage_device"
