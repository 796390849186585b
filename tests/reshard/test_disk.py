"""Weights by way of a folder: a checkpoint that anybody can load, whole or not there, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.bridge.hf_io import HFReader
from megarl.bridge.model_map import ModelMap
from megarl.errors import RunError
from megarl.models.tiny import make_tiny
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.disk import Disk, as_file
from tests.reshard.receiver import Receiver
from tests.reshard.whole import Whole


class Looking(Receiver):
    """Notes what the folder of weights holds whenever something is to be loaded."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder
        self.seen: list[list[str]] = []

    def take(self, views: dict[str, torch.Tensor]) -> None:
        super().take(views)
        self.seen.append(sorted(path.name for path in self.folder.iterdir()))


def disk(source: Path, folder: Path) -> Disk:
    options = {"dtype": "bfloat16", "bucket_bytes": 100_000, "verify": "off"}
    return Disk(ModelMap.from_hf(source), **options, folder=folder, source=source)


def test_every_version_is_a_checkpoint_and_the_old_ones_go(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = make_tiny("llama", tmp_path / "model")
    transfer, receiver = disk(source, tmp_path / "weights"), Looking(tmp_path / "weights")
    transfer.push(Whole(source), receiver, 1)
    transfer.push(Whole(source), receiver, 2)
    assert {len(seen) for seen in receiver.seen} == {1, 2}  # the last one is kept until the next is loaded
    (left,) = (tmp_path / "weights").iterdir()
    assert left.name == "version-2"
    HFReader(left).check(ModelMap.from_hf(source))
    model = AutoModelForCausalLM.from_pretrained(left)
    assert model.dtype == torch.bfloat16
    want = load_file(source / "model.safetensors")
    assert all(torch.equal(tensor, want[name].bfloat16()) for name, tensor in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(left).encode("one")
    transfer.close()
    assert not (tmp_path / "weights").exists()


def test_a_half_written_version_is_never_seen(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "model")
    transfer, receiver = disk(source, tmp_path / "weights"), Receiver()
    with pytest.raises(RunError, match="a rank was lost"):
        transfer.push(Whole(source, halt="lm_head.weight"), receiver, 1)
    assert receiver.arrivals == [] and not (tmp_path / "weights").exists()
    transfer.close()


def test_a_folder_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "model")
    (tmp_path / "weights").write_text("a file")
    with pytest.raises(RunError, match=r"weight sync: .*weights/version-1 cannot be"):
        disk(source, tmp_path / "weights").push(Whole(source), Receiver(), 1)


def test_tensors_of_two_kinds_lie_aligned(tmp_path: Path) -> None:
    """float32 among bfloat16 of an odd size."""
    tensors = [("odd", torch.bfloat16, (3, 5)), ("bias", torch.float32, (7,)), ("last", torch.bfloat16, (2, 2))]
    from safetensors.torch import load_file as load

    from megarl.reshard.disk import _begin

    spec, header = as_file(BucketSpec.plan(str(tmp_path / "x.safetensors"), tensors))
    _begin(spec, header)
    for number, view in enumerate(spec.views().values()):
        view.fill_(number + 1)
    found = load(tmp_path / "x.safetensors")
    assert {name: (t.dtype, tuple(t.shape)) for name, t in found.items()} == {n: (d, s) for n, d, s in tensors}
    assert {name: float(t.float().mean()) for name, t in found.items()} == {"bias": 1, "odd": 2, "last": 3}
