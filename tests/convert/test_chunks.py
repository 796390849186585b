"""Files of chunks and their metadata as others write and read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.bridge.torch_dist import DistReader
from megarl.bridge.torch_dist_write import ChunkFile, write_common, write_metadata
from megarl.errors import UserError


def test_metadata_that_is_written_is_read_by_torch(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    with ChunkFile(tmp_path / "__0_0.distcp") as file:
        file.write("a", torch.arange(6.0).view(2, 3), (0, 0), (2, 3))
        file.write_object("b", {"x": 1})
    write_metadata(tmp_path, file.records)
    metadata = FileSystemReader(tmp_path).read_metadata()
    assert set(metadata.state_dict_metadata) == {"a", "b"}
    with pytest.raises(UserError, match="holds no metadata.json"):
        DistReader(tmp_path)


def test_chunks_that_lie_over_each_other_are_refused(tmp_path: Path) -> None:
    """There are as many elements as there should be, and half of the tensor was never written."""
    with ChunkFile(tmp_path / "__0_0.distcp") as file:
        for _ in range(2):
            file.write("weight", torch.ones(2, 3), (0, 0), (4, 3))
    write_metadata(tmp_path, file.records)
    write_common(tmp_path, {})
    with pytest.raises(UserError, match="chunks of weight lie over each other"):
        DistReader(tmp_path).read("weight", (slice(0, 4), slice(0, 3)), torch.zeros(4, 3))


@pytest.mark.parametrize("in_order", [True, False])
def test_strides_count_but_for_axes_of_length_1(in_order: bool, tmp_path: Path) -> None:
    """Chunks as another program may write them: the elements lie one after another, or every fourth is one."""
    whole = torch.arange(72.0).view(1, 72).t() if in_order else torch.arange(288.0).view(72, 4)[:, :1]
    with ChunkFile(tmp_path / "__0_0.distcp") as file:
        file.write("weight", whole, (0, 0), (72, 1))
    torch.save(whole, tmp_path / "__0_0.distcp")
    file.records[0] |= {"start": 0, "length": (tmp_path / "__0_0.distcp").stat().st_size}
    write_metadata(tmp_path, file.records)
    write_common(tmp_path, {})
    out = torch.zeros(72, 1)
    if in_order:
        DistReader(tmp_path).read("weight", (slice(0, 72), slice(0, 1)), out)
        assert torch.equal(out, whole) and whole.stride() == (1, 72)
    else:
        with pytest.raises(UserError, match=r"is damaged at byte 0: the tensor there has strides \(4, 1\)"):
            DistReader(tmp_path).read("weight", (slice(0, 72), slice(0, 1)), out)
