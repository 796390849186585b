"""A bucket is one mapped file: what one process writes through its views, another reads."""

import subprocess
import sys

import pytest
import torch

from megarl.errors import RunError
from megarl.reshard.bucket import BucketSpec

TENSORS = [("a.weight", torch.bfloat16, (3, 5)), ("b.bias", torch.float32, (7,)), ("scalar", torch.float32, ())]


def test_written_here_read_there(tmp_path):
    spec = BucketSpec.plan(str(tmp_path / "bucket"), TENSORS, prove=["b.bias"])
    assert all(item.offset % 64 == 0 for item in spec.tensors)
    spec.create()
    for index, view in enumerate(spec.views().values()):
        view.fill_(index + 1)
    code = (
        "import sys; from megarl.reshard.bucket import BucketSpec; spec = BucketSpec.from_json(sys.argv[1])\n"
        "print({n: (tuple(t.shape), str(t.dtype), float(t.sum())) for n, t in spec.views().items()}, spec.prove)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, spec.to_json()], capture_output=True, text=True, check=True
    ).stdout
    expected = {
        "a.weight": ((3, 5), "torch.bfloat16", 15.0),
        "b.bias": ((7,), "torch.float32", 14.0),
        "scalar": ((), "torch.float32", 3.0),
    }
    assert out.strip() == f"{expected} ('b.bias',)"
    assert BucketSpec.from_json(spec.to_json()) == spec


def test_short_missing_or_impossible_files_are_one_sentence(tmp_path):
    spec = BucketSpec.plan(str(tmp_path / "bucket"), TENSORS)
    with pytest.raises(RunError, match="No such file"):
        spec.views()
    (tmp_path / "bucket").write_bytes(b"short")
    with pytest.raises(RunError, match="has 5 bytes"):
        spec.views()
    huge = BucketSpec.plan("/dev/shm/megarl-test-huge", [("x", torch.float32, (1 << 50,))])
    with pytest.raises(RunError, match="no room for a weight bucket"):
        huge.create()
