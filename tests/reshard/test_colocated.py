"""Weights from real ranks through shared buckets: bit-exact and each element once, and every planted fault is named."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.bridge.model_map import ModelMap
from megarl.errors import RunError
from megarl.models.tiny import make_tiny
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.colocated import Colocated
from megarl.reshard.fingerprint import combine, fingerprint
from tests.reshard.ranks import Ranks

LAYOUTS = {"tp2": {"tensor": 2}, "pp2": {"pipeline": 2}, "dp2": {"data": 2}}
FAMILY = {
    "tp2": "qwen2-untied",
    "pp2": "qwen2",
    "dp2": "qwen3",
}  # biases, tied with a copy on the last stage, q and k norms
FULL = "model.layers.2.mlp.up_proj.weight"


class Receiver:
    """The engines' side: copies what it is given, and takes fingerprints of its own copy."""

    def __init__(self, fault: Callable[[dict[str, Tensor]], object] = lambda tensors: None):
        self.tensors: dict[str, Tensor] = {}
        self.arrivals: list[str] = []
        self.buckets: list[list[str]] = []
        self.versions: list[int] = []
        self._fault = fault

    def begin_update(self, version: int) -> None:
        self.versions.append(version)
        self.tensors, self.arrivals, self.buckets = {}, [], []

    def load(self, bucket: BucketSpec) -> BucketSpec:
        return bucket  # it is read as late as allowed: when its file is to be written again

    def loaded(self, token: BucketSpec) -> None:
        views = token.views()
        self.buckets.append(list(views))
        self.arrivals += views
        self.tensors |= {name: view.clone() for name, view in views.items()}

    def end_update(self) -> list[dict[str, int]]:
        self._fault(self.tensors)
        return [{name: fingerprint(tensor) for name, tensor in self.tensors.items()}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")
    return functools.cache(lambda family: make_tiny(family, root / family))


@pytest.fixture(scope="module")
def ranks(folder: Callable[[str], Path]) -> Iterator[Callable[[str], Ranks]]:
    started: dict[str, Ranks] = {}

    def of(layout: str) -> Ranks:
        if layout not in started:
            started[layout] = Ranks(folder(FAMILY[layout]), **LAYOUTS[layout])
        return started[layout]

    yield of
    for group in started.values():
        group.close()


def transfer(folder: Path, *, bucket_bytes: int = 100_000, dtype: str = "float32", verify: str = "full") -> Colocated:
    return Colocated(ModelMap.from_hf(folder), dtype=dtype, bucket_bytes=bucket_bytes, verify=verify)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_arrives_bit_exact(ranks, folder, layout: str, dtype: str) -> None:
    """These tests run before any that change weights: the checkpoint is what must arrive."""
    source = folder(FAMILY[layout])
    want = load_file(source / "model.safetensors")
    colocated, receiver = transfer(source, dtype=dtype), Receiver()
    try:
        report = colocated.push(ranks(layout), receiver, 7)
        exported = {name: tensor.clone() for name, tensor in colocated.tensors(ranks(layout))}
    finally:
        colocated.close()
    assert receiver.versions == [7]
    assert sorted(receiver.arrivals) == sorted(ModelMap.from_hf(source).hf_shapes)  # each once
    assert len(receiver.buckets) > 3  # so that both buckets were used again
    assert report.tensors == report.verified == len(want)
    assert report.bytes >= sum(t.numel() for t in want.values()) * (4 if dtype == "float32" else 2)
    for copy in (receiver.tensors, exported):
        assert copy.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.equal(copy[name], tensor.to(getattr(torch, dtype))), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_element_is_written_once(ranks, folder, layout: str) -> None:
    """Shares of fingerprints are linear: an element that two ranks answer for would count twice."""
    source = folder(FAMILY[layout])
    want = load_file(source / "model.safetensors")
    shares = ranks(layout).fingerprints(list(want), "float32")
    for name, tensor in want.items():
        assert combine([share[name] for share in shares if name in share]) == fingerprint(tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranks_share_the_work(ranks, folder, layout: str) -> None:
    names = list(load_file(folder(FAMILY[layout]) / "model.safetensors"))
    counts = [len(share) for share in ranks(layout).fingerprints(names, "float32")]
    assert min(counts) > len(names) / 3


@pytest.mark.parametrize("bucket_bytes", [1, 50_000, 1 << 30])
def test_buckets_of_any_size(ranks, folder, bucket_bytes: int) -> None:
    """Smaller than the largest tensor, which then travels alone, and larger than the model."""
    source = folder(FAMILY["tp2"])
    colocated, receiver = transfer(source, bucket_bytes=bucket_bytes), Receiver()
    try:
        colocated.push(ranks("tp2"), receiver, 1)
    finally:
        colocated.close()
    want = load_file(source / "model.safetensors")
    assert all(torch.equal(receiver.tensors[name], tensor) for name, tensor in want.items())
    sizes = [sum(want[name].numel() * 4 for name in bucket) for bucket in receiver.buckets]
    assert all(size <= bucket_bytes or len(bucket) == 1 for size, bucket in zip(sizes, receiver.buckets, strict=True))
    assert len(receiver.buckets) == (1 if bucket_bytes == 1 << 30 else len(want) if bucket_bytes == 1 else len(sizes))


def _swap(tensors: dict[str, Tensor]) -> None:
    other = FULL.replace("layers.2", "layers.1")
    tensors[FULL], tensors[other] = tensors[other], tensors[FULL]


def _drop(tensors: dict[str, Tensor]) -> None:
    del tensors[FULL]


def _transpose(tensors: dict[str, Tensor]) -> None:
    tensors[FULL] = tensors[FULL].t().contiguous().view(tensors[FULL].shape)


def _one_bit(tensors: dict[str, Tensor]) -> None:
    tensors[FULL].view(torch.int32)[17, 3] ^= 1


def _shift(tensors: dict[str, Tensor]) -> None:
    tensors[FULL] = tensors[FULL].roll(1, 0)


@pytest.mark.parametrize("fault", [_swap, _drop, _transpose, _one_bit, _shift])
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_fault_of_the_engine_is_named(ranks, folder, layout: str, fault: Callable) -> None:
    colocated = transfer(folder(FAMILY[layout]))
    try:
        with pytest.raises(
            RunError, match=r"weight sync: model\.layers\.[12]\.mlp\.up_proj\.weight in engine 0|never loaded"
        ):
            colocated.push(ranks(layout), Receiver(fault), 1)
    finally:
        colocated.close()


def test_sampled_verification_reaches_every_tensor_in_turn(ranks, folder) -> None:
    colocated = transfer(folder(FAMILY["tp2"]), verify="sampled")
    caught = 0
    try:
        for version in range(8):
            try:
                report = colocated.push(ranks("tp2"), Receiver(_one_bit), version)
                assert 0 < report.verified < report.tensors / 4
            except RunError as error:
                assert FULL in str(error)
                caught += 1
                colocated._turn += 1  # a run would end here; the next turn is looked at as well
    finally:
        colocated.close()
    assert caught == 1


def test_verification_can_be_off(ranks, folder) -> None:
    colocated = transfer(folder(FAMILY["tp2"]), verify="off")
    try:
        assert colocated.push(ranks("tp2"), Receiver(_one_bit), 1).verified == 0
    finally:
        colocated.close()


def test_changed_weights_arrive_and_a_stale_slice_is_named(ranks, folder) -> None:
    """One of two tensor-parallel ranks writes what its slice was before the update."""
    source, group = folder(FAMILY["tp2"]), ranks("tp2")
    before = load_file(source / "model.safetensors")
    colocated, receiver = transfer(source), Receiver()
    try:
        for rank in (0, 1):
            group.change(rank)
        colocated.push(group, receiver, 1)
        assert all(not torch.equal(receiver.tensors[name], tensor) for name, tensor in before.items())
        group.freeze(1, FULL)
        colocated.push(group, receiver, 2)  # not stale yet
        for rank in (0, 1):
            group.change(rank)
        with pytest.raises(RunError, match=f"weight sync: {FULL} in engine 0 differs from the trainer's"):
            colocated.push(group, receiver, 3)
    finally:
        colocated.close()


def test_buckets_of_dead_processes_are_removed(folder) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mark = uuid.uuid4().hex
    stale, living = (Path(f"/dev/shm/megarl-{pid}-{mark}-0") for pid in (dead.pid, os.getpid()))
    try:
        stale.touch()
        living.touch()
        transfer(folder(FAMILY["tp2"])).close()
        assert not stale.exists() and living.exists()
    finally:
        stale.unlink(missing_ok=True)
        living.unlink(missing_ok=True)


def test_closing_gives_the_memory_back(folder) -> None:
    colocated = transfer(folder(FAMILY["tp2"]))
    mine = f"megarl-{os.getpid()}-"
    assert [path for path in Path("/dev/shm").iterdir() if path.name.startswith(mine)]
    colocated.close()
    assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith(mine)]


def test_no_room_in_shared_memory_is_one_sentence(folder) -> None:
    """More than the machine has; nothing stays behind."""
    system = os.statvfs("/dev/shm")
    name = f"/dev/shm/megarl-{os.getpid()}-too-large"
    whole = system.f_frsize * system.f_blocks
    with pytest.raises(RunError, match=r"no room for a weight bucket of \d+ MiB at .*: make reshard.bucket_mb smaller"):
        BucketSpec.plan(name, [("x", torch.uint8, (2 * whole,))]).create()
    assert not Path(name).exists()
