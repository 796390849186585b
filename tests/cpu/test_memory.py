"""Memory that is given back: whole pages of the tensors, and nothing beside them."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from megarl.cpu.memory import give_back, peak

MIB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_pages_go_back_and_read_as_zeros() -> None:
    big = torch.ones(64 * MIB // 4)
    before = resident()
    returned = give_back([big])
    assert big.nbytes - 2 * 4096 <= returned <= big.nbytes
    assert before - resident() > 0.9 * big.nbytes
    assert big[8192:-8192].eq(0).all()
    big.fill_(3)
    assert resident() > before - 0.1 * big.nbytes and big.eq(3).all()


def test_what_shares_a_page_with_something_else_stays() -> None:
    """Weights lie beside each other in one piece of memory; an odd number of bytes from a page's start each."""
    whole = torch.ones(MIB // 4)
    one, two, three = whole[37:80_001], whole[80_001:80_040], whole[80_040:200_000]
    returned = give_back([one, three])
    assert 0 < returned <= one.nbytes + three.nbytes
    assert two.eq(1).all() and whole[:37].eq(1).all() and whole[200_000:].eq(1).all()
    assert int(whole.eq(0).sum()) * 4 == returned
    assert give_back([torch.ones(500), two, torch.ones(0)]) == 0


def test_what_lies_in_a_file_or_in_pieces_stays(tmp_path: Path) -> None:
    torch.ones(MIB // 4).numpy().tofile(tmp_path / "weights")
    shared, private = (
        torch.from_file(str(tmp_path / "weights"), shared=shared, size=MIB // 4) for shared in (True, False)
    )
    private.fill_(2)
    pieces = torch.ones(1024, 1024).t()
    assert give_back([shared, private, pieces]) == 0
    assert shared.eq(1).all() and private.eq(2).all() and pieces.eq(1).all()


@pytest.mark.parametrize("size", [32, 128])
def test_a_peak_is_that_since_the_last_time(size: int) -> None:
    peak([os.getpid()])
    lowest = peak([os.getpid()])
    fresh = mmap.mmap(-1, size * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # torch's own may reuse old pages
    held = torch.frombuffer(fresh, dtype=torch.uint8).fill_(1)
    give_back([held])
    assert abs(peak([os.getpid()]) - lowest - held.nbytes) < 8 * MIB
    assert abs(peak([os.getpid()]) - lowest) < 8 * MIB
    assert peak([1 << 22]) == 0  # nobody
