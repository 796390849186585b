"""Bytes that are copied from file to file, and looked at where they lie."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.bridge.raw_io import Run, copy_run, mapped
from megarl.errors import UserError

CONTENT = bytes(torch.randint(0, 256, (40_007,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8).numpy())


@pytest.fixture(params=["the same file system", "another one"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """A descriptor; between file systems the kernel does not copy."""
    there = request.param == "the same file system"
    file = os.open(tmp_path / "source", os.O_CREAT | os.O_RDWR) if there else os.memfd_create("source")
    os.write(file, CONTENT)
    yield file
    os.close(file)


def test_runs_are_appended_where_a_file_is(source: int, tmp_path: Path) -> None:
    with (tmp_path / "target").open("wb") as target:
        target.write(b"before")
        copy_run(Run(tmp_path / "source", source, 7, 30_001), target)
        target.write(b"between")
        copy_run(Run(tmp_path / "source", source, 0, 5), target)
        target.write(b"after")
    want = b"before" + CONTENT[7:30_008] + b"between" + CONTENT[:5] + b"after"
    assert (tmp_path / "target").read_bytes() == want


def test_a_run_beyond_the_end_is_one_sentence(source: int, tmp_path: Path) -> None:
    with (tmp_path / "target").open("wb") as target, pytest.raises(UserError, match="source is cut short"):
        copy_run(Run(tmp_path / "source", source, 40_000, 8), target)


@pytest.mark.parametrize("start", [0, 2, 4094, 4096, 12_290])
def test_a_run_is_looked_at_where_it_lies(source: int, start: int, tmp_path: Path) -> None:
    with mapped(Run(tmp_path / "source", source, start, 9_000), torch.int16) as tensor:
        assert bytes(tensor.view(torch.uint8).numpy()) == CONTENT[start : start + 9_000]
        del tensor
