"""Weights from real ranks over every transport: bit-exact and each element once, and every planted fault is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.bridge.model_map import ModelMap
from megarl.errors import RunError
from megarl.reshard.colocated import Colocated
from megarl.reshard.disk import Disk
from megarl.reshard.distributed import Distributed
from megarl.reshard.fingerprint import combine, fingerprint
from megarl.reshard.transfer import SAMPLED, Transfer
from tests.reshard.ranks import FUSED, LAYOUTS
from tests.reshard.receiver import Receiver

FULL = "model.layers.2.mlp.up_proj.weight"
EXPERT = "model.layers.2.mlp.experts.{}.down_proj.weight"
TRANSPORTS = ("colocated", "distributed", "disk")


@pytest.fixture
def transfer(tmp_path: Path) -> Iterator[Callable[..., Transfer]]:
    """Makes a transfer of a model's weights, and closes it."""
    made: list[Transfer] = []

    def make(kind: str, source: Path, **options: Any) -> Transfer:
        settings = {"dtype": "float32", "bucket_bytes": 100_000, "verify": "full"} | options
        model = ModelMap.from_hf(source)
        if kind == "disk":
            made.append(Disk(model, **settings, folder=tmp_path / "weights", source=source))
        elif kind == "distributed":
            made.append(Distributed(model, **settings, timeout=60))
        else:
            made.append(Colocated(model, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in FUSED)])
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_every_tensor_arrives_bit_exact(transfer, ranks, folder, kind: str, layout: str, dtype: str) -> None:
    source = folder(layout)
    want = load_file(source / "model.safetensors")
    receiver = Receiver()
    report = transfer(kind, source, dtype=dtype).push(ranks(layout), receiver, 7)
    assert receiver.versions == [7]
    assert sorted(receiver.arrivals) == sorted(ModelMap.from_hf(source).hf_shapes)  # each once
    assert len(receiver.buckets) > 3  # so that both buckets were used again
    assert report.tensors == report.verified == len(want)
    assert report.bytes >= sum(t.numel() for t in want.values()) * (4 if dtype == "float32" else 2)
    assert receiver.tensors.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(receiver.tensors[name], tensor.to(getattr(torch, dtype))), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_element_is_written_once(ranks, folder, layout: str) -> None:
    """Shares of fingerprints are linear: an element that two ranks answer for would count twice."""
    want = load_file(folder(layout) / "model.safetensors")
    shares = ranks(layout).shares(dict.fromkeys(want, "float32"))
    for name, tensor in want.items():
        assert combine([share[name] for share in shares if name in share]) == fingerprint(tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ranks_share_the_work(ranks, folder, layout: str) -> None:
    names = list(load_file(folder(layout) / "model.safetensors"))
    counts = [len(share) for share in ranks(layout).shares(dict.fromkeys(names, "float32"))]
    assert min(counts) > len(names) / 3


@pytest.mark.parametrize("bucket_bytes", [1, 50_000, 1 << 30])
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_buckets_of_any_size(transfer, ranks, folder, kind: str, bucket_bytes: int) -> None:
    """Smaller than the largest tensor, which then travels alone, and larger than the model."""
    source, receiver = folder("tp2"), Receiver()
    transfer(kind, source, bucket_bytes=bucket_bytes).push(ranks("tp2"), receiver, 1)
    want = load_file(source / "model.safetensors")
    assert all(torch.equal(receiver.tensors[name], tensor) for name, tensor in want.items())
    sizes = [sum(want[name].numel() * 4 for name in bucket) for bucket in receiver.buckets]
    assert all(size <= bucket_bytes or len(bucket) == 1 for size, bucket in zip(sizes, receiver.buckets, strict=True))
    assert len(receiver.buckets) == (1 if bucket_bytes == 1 << 30 else len(want) if bucket_bytes == 1 else len(sizes))


class _Dying(Receiver):
    """At its first try to join it is gone; at the second another engine is in its place."""

    tries = 0

    def link(self, *arguments: Any) -> object:
        self.tries += 1
        return None if self.tries == 1 else super().link(*arguments)

    def lost(self, token: object, wait: float) -> bool:
        return token is None


def test_ranks_do_not_wait_for_an_engine_that_died_while_joining(transfer, ranks, folder) -> None:
    source, group, receiver = folder("tp2"), ranks("tp2"), _Dying()
    transfer("distributed", source).push(group, receiver, 1)
    assert group.gave_up == ["the meeting was called off"] * 2
    want = load_file(source / "model.safetensors")
    assert all(torch.equal(receiver.tensors[name], tensor) for name, tensor in want.items())


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


def _wrong_expert(tensors: dict[str, Tensor]) -> None:
    one, other = EXPERT.format(3), EXPERT.format(7)
    tensors[one], tensors[other] = tensors[other], tensors[one]


FAULTS = {
    ("tp2", _swap): r"model\.layers\.[12]\.mlp\.up_proj\.weight in engine 0 differs",
    ("pp2", _drop): f"engine 0 did not report {FULL}: it was never loaded",
    ("tp2", _transpose): f"{FULL} in engine 0 differs",
    ("pp2", _one_bit): f"{FULL} in engine 0 differs",
    ("tp2", _shift): f"{FULL} in engine 0 differs",
    ("ep2", _wrong_expert): r"model\.layers\.2\.mlp\.experts\.[37]\.down_proj\.weight in engine 0 differs",
}


@pytest.mark.parametrize(("layout", "fault"), FAULTS)
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_fault_of_the_engine_is_named(transfer, ranks, folder, kind: str, layout: str, fault: Callable) -> None:
    with pytest.raises(RunError, match=f"weight sync: {FAULTS[layout, fault]}"):
        transfer(kind, folder(layout)).push(ranks(layout), Receiver(fault), 1)


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_changed_weights_arrive_and_a_stale_slice_is_named(transfer, ranks, folder, kind: str) -> None:
    """One of two tensor-parallel ranks writes what its slice was before the update."""
    source, group = folder("tp2"), ranks("tp2")
    before = load_file(source / "model.safetensors")
    moving, receiver = transfer(kind, source), Receiver()
    try:
        group.change()
        moving.push(group, receiver, 1)
        assert all(not torch.equal(receiver.tensors[name], tensor) for name, tensor in before.items())
        group.freeze(1, FULL)
        moving.push(group, receiver, 2)  # not stale yet
        group.change()
        with pytest.raises(RunError, match=f"weight sync: {FULL} in engine 0 differs from the trainer's"):
            moving.push(group, receiver, 3)
    finally:
        group.restore()


def test_sampled_verification_reaches_every_tensor_in_turn(transfer, ranks, folder) -> None:
    moving = transfer("colocated", folder("tp2"), verify="sampled", full_every=SAMPLED + 1)
    report = moving.push(ranks("tp2"), Receiver(), 0)
    assert report.verified == report.tensors  # an engine's first
    caught, moving._turn = [], 0
    for version in range(SAMPLED + 2):
        try:
            report = moving.push(ranks("tp2"), Receiver(_one_bit), version)
            assert 0 < report.verified < report.tensors / 16
        except RunError as error:
            assert FULL in str(error)
            caught.append(version)
            moving._turn += 1  # a run would end here; the next turn is looked at as well
    assert len(caught) == 3 and {0, SAMPLED + 1} < set(caught)  # the full ones, and one of the sampled ones between


def test_verification_can_be_off(transfer, ranks, folder) -> None:
    assert transfer("colocated", folder("tp2"), verify="off").push(ranks("tp2"), Receiver(_one_bit), 1).verified == 0
