"""Buckets in shared memory: made, used again, read for an export, and given back."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.bridge.model_map import ModelMap
from megarl.errors import RunError
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.colocated import Colocated


def transfer(folder: Path) -> Colocated:
    return Colocated(ModelMap.from_hf(folder), dtype="float32", bucket_bytes=100_000, verify="full")


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_an_export_reads_every_tensor(ranks, folder, layout: str) -> None:
    want = load_file(folder(layout) / "model.safetensors")
    colocated = transfer(folder(layout))
    try:
        exported = {name: tensor.clone() for name, tensor in colocated.tensors(ranks(layout))}
    finally:
        colocated.close()
    assert exported.keys() == want.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in want.items())


def test_buckets_of_dead_processes_are_removed(folder) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mark = uuid.uuid4().hex
    stale, living = (Path(f"/dev/shm/megarl-{pid}-{mark}-0") for pid in (dead.pid, os.getpid()))
    try:
        stale.touch()
        living.touch()
        transfer(folder("tp2")).close()
        assert not stale.exists() and living.exists()
    finally:
        stale.unlink(missing_ok=True)
        living.unlink(missing_ok=True)


def test_closing_gives_the_memory_back(folder) -> None:
    colocated = transfer(folder("tp2"))
    mine = f"megarl-{os.getpid()}-"
    assert [path for path in Path("/dev/shm").iterdir() if path.name.startswith(mine)]
    colocated.close()
    assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith(mine)]


def test_no_room_in_shared_memory_is_one_sentence() -> None:
    """More than the machine has; nothing stays behind."""
    system = os.statvfs("/dev/shm")
    name = f"/dev/shm/megarl-{os.getpid()}-too-large"
    whole = system.f_frsize * system.f_blocks
    with pytest.raises(RunError, match=r"no room for a weight bucket of \d+ MiB at .*: make reshard.bucket_mb smaller"):
        BucketSpec.plan(name, [("x", torch.uint8, (2 * whole,))]).create()
    assert not Path(name).exists()
