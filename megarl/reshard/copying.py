"""Many copies in host memory by several threads.

torch's own copy shares each tensor out over OpenMP's threads, which sleep between two tensors (`megarl.cpu.process_env`): waking them
for every slice took as long as copying it. Here each thread takes the next piece that nobody has taken.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

_PIECE = 4 << 20  # bytes


def copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], threads: int | None = None) -> None:
    """Copy the second tensor of each pair into the first, on so many threads (None: as many as torch computes on). Both are of one
    shape; no two targets overlap."""
    pieces = list(_pieces(pairs))
    todo = iter(pieces)  # taking the next is one step of the interpreter: no two threads get the same

    def work(_: int) -> None:
        for there, here, size in todo:
            ctypes.memmove(there, here, size)  # lets go of the interpreter meanwhile

    threads = min(threads or torch.get_num_threads(), len(pieces))
    if threads < 2:
        work(0)
        return
    with ThreadPoolExecutor(threads - 1) as others:
        begun = others.map(work, range(threads - 1))
        work(0)
        list(begun)


def _pieces(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[tuple[int, int, int]]:
    """Address of the target, of the source, bytes. What is more than a copy of bytes is done at once."""
    for there, here in pairs:
        alike = there.dtype == here.dtype and there.is_cpu and here.is_cpu
        if not (alike and there.is_contiguous() and here.is_contiguous()):
            there.copy_(here)
            continue
        to, source, size = there.data_ptr(), here.data_ptr(), there.nbytes
        for start in range(0, size, _PIECE):
            yield to + start, source + start, min(_PIECE, size - start)
