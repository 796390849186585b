"""Buckets in shared memory: made, used again, read for an export, and given back."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from threading import Timer

import pytest
import torch
from safetensors.torch import load_file

from megarl.bridge.model_map import ModelMap
from megarl.errors import RunError
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.colocated import Colocated
from megarl.reshard.gathered import gathered
from megarl.reshard.stream import Control, Stream
from tests.reshard.receiver import Receiver
from tests.reshard.whole import Whole


def transfer(folder: Path) -> Colocated:
    return Colocated(ModelMap.from_hf(folder), dtype="float32", bucket_bytes=100_000, verify="full")


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_an_export_reads_every_tensor(ranks, folder, layout: str) -> None:
    """Through shared memory, and as messages."""
    want = load_file(folder(layout) / "model.safetensors")
    colocated = transfer(folder(layout))
    try:
        exported = {name: tensor.clone() for name, tensor in colocated.tensors(ranks(layout))}
    finally:
        colocated.close()
    sent = dict(gathered(colocated.buckets, ranks(layout)))
    assert list(exported) == list(sent) and exported.keys() == want.keys()
    assert all(torch.equal(exported[name], tensor) and torch.equal(sent[name], tensor) for name, tensor in want.items())


def test_a_rank_that_fails_is_named_though_engines_wait_for_it(folder) -> None:
    colocated, whole = transfer(folder("tp2")), Whole(folder("tp2"), halt="lm_head.weight")
    try:
        with pytest.raises(RunError, match="a rank was lost"):
            colocated.push(whole, Receiver(), 1)
        whole.halt = ""
        receiver = Receiver()
        colocated._verify = "off"
        colocated.push(whole, receiver, 2)  # nothing of the failure is left
        assert all(torch.equal(receiver.tensors[name], tensor) for name, tensor in whole.tensors.items())
    finally:
        colocated.close()


class _Refusing(Receiver):
    def take(self, views: dict[str, torch.Tensor]) -> None:
        if len(self.buckets) == 2:
            raise RunError("the engine refused")
        super().take(views)


def test_an_engine_that_refuses_is_named_though_ranks_wait_for_it(folder) -> None:
    colocated = transfer(folder("tp2"))
    try:
        with pytest.raises(RunError, match="the engine refused"):
            colocated.push(Whole(folder("tp2")), _Refusing(), 1)
    finally:
        colocated.close()


class _OneOfTwo(Receiver):
    """The other engine takes nothing, and is given up after a while."""

    lost: list[tuple[int, int]]

    def ranks(self) -> int:
        return 2

    def load_stream(self, stream: Stream, control: Control) -> None:
        timer = Timer(0.2, lambda: (self.lost.extend(control.holding_up()), control.loaded(1)))
        timer.start()
        super().load_stream(stream, control)
        timer.join()


def test_an_engine_that_is_lost_is_not_waited_for(folder) -> None:
    colocated, whole, receiver = transfer(folder("tp2")), Whole(folder("tp2")), _OneOfTwo()
    receiver.lost = []
    colocated._verify = "off"
    try:
        colocated.push(whole, receiver, 1)
    finally:
        colocated.close()
    assert receiver.lost == [(1, 0)]  # it held everybody up
    assert len(receiver.buckets) > 2  # more than there are places: the ranks had to go on without it
    assert all(torch.equal(receiver.tensors[name], tensor) for name, tensor in whole.tensors.items())


def test_who_does_not_go_on_is_an_error(tmp_path: Path) -> None:
    control = Control.begin(Stream(str(tmp_path / "control"), [], 2, writers=2, loaders=1, timeout=0.05))
    control.wrote(0, 1)
    with pytest.raises(RunError, match="the ranks did not go on within"):
        control.wait_written(1)
    control.wrote(1, 1)
    control.wait_written(1)
    with pytest.raises(RunError, match="the engines did not go on within"):
        control.wait_loaded(1)
    control.loaded(0)
    control.wait_loaded(1000)


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
