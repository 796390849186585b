"""Work on a (B, T) tensor a few rows at a time, so that what lies between input and output stays in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.algorithms.masking import as_mask, working

# 4 MiB of float32. A temporary of 8192 x 1024 costs more in fresh pages than all the arithmetic on it; smaller blocks cost
# more calls, each of which waits for all threads, which is dear where other processes use the cores.
ELEMENTS = 1 << 20
COLUMNS = 1024  # what is skipped, and what is summed at once
_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


def blocks(mask_BT: Tensor) -> Iterator[tuple[slice, int]]:
    """Rows that together cover the bool mask, and a width right of which they have nothing unmasked: all columns, or less by
    whole COLUMNS (on a GPU all, for to find out would be to wait for it)."""
    rows, columns = mask_BT.shape
    step = rows_at_once(mask_BT)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        width = columns
        if columns > COLUMNS and mask_BT.device.type == "cpu":
            width = -(-occupied_width(mask_BT[part]) // COLUMNS) * COLUMNS
        yield part, min(width, columns)


def rows_at_once(mask_BT: Tensor) -> int:
    """How many rows a block has; all of them on a GPU, where memory is pooled and launches cost."""
    rows, columns = mask_BT.shape
    return max(1, ELEMENTS // max(columns, 1) if mask_BT.device.type == "cpu" else rows)


def occupied_width(mask_RT: Tensor) -> int:
    """How many columns there are up to the last that is unmasked in any row."""
    if not mask_RT.numel():
        return 0
    occupied = mask_RT.view(torch.uint8).amax(0).nonzero()  # `any` over bools is not vectorised
    return int(occupied[-1]) + 1 if len(occupied) else 0


@torch.no_grad()
def masked(values_RT: Tensor, mask_RT: Tensor, out_RT: Tensor | None = None) -> Tensor:
    """The values in working precision, which broadcast to the bool mask, and 0 where masked, whatever they are there. New, or
    in out_RT, which must not be the values.

    A product of their bits, as whole numbers, with 0 or 1: as fast as a product of floats, but NaN does not pass. `where`
    branches on every element on a CPU.
    """
    values_RT = working(values_RT)
    integer = _INTEGER[values_RT.dtype]
    bits = torch.empty(mask_RT.shape, dtype=integer, device=mask_RT.device) if out_RT is None else out_RT.view(integer)
    return bits.copy_(mask_RT.view(torch.int8)).mul_(values_RT.view(integer)).view(values_RT.dtype)


def fill_masked(out_BT: Tensor, mask_BT: Tensor, formula: Callable[[slice, int], Tensor]) -> Tensor:
    """out_BT, with formula(rows, width) in these rows and columns, block by block, and 0 where masked."""
    mask_BT = as_mask(mask_BT)
    for rows, width in blocks(mask_BT):
        masked(formula(rows, width), mask_BT[rows, :width], out_BT[rows, :width])
        out_BT[rows, width:] = 0
    return out_BT


@torch.no_grad()
def masked_sums(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B,) each row's sum over unmasked places, in working precision. Equal rows have equal sums, to the last bit, for the
    order of additions depends on T alone."""
    mask_BT = as_mask(mask_BT)
    sum_B = torch.zeros(len(values_BT), dtype=torch.float64, device=values_BT.device)  # of sums over COLUMNS
    for rows, width in blocks(mask_BT):
        for start in range(0, width, COLUMNS):
            columns = slice(start, min(start + COLUMNS, width))
            sum_B[rows] += masked(values_BT[rows, columns], mask_BT[rows, columns]).sum(-1)
    return sum_B.to(working(values_BT[:0]).dtype)


def unmasked(mask_BT: Tensor) -> Tensor:
    """(B,) float32: how many places of each row are unmasked; exact up to 2^24. Counts eight bytes at a time, as one number
    of 64 bits: a byte of it holds sums up to 255."""
    mask_BT = as_mask(mask_BT)
    rows, columns = mask_BT.shape
    if not columns:
        return torch.zeros(rows, device=mask_BT.device)
    if columns % 8 or mask_BT.stride() != (columns, 1) or mask_BT.storage_offset() % 8:
        mask_BT = pad(mask_BT, (0, -columns % 8)).clone(memory_format=torch.contiguous_format)
    count_B = torch.zeros(rows, device=mask_BT.device)
    for words in mask_BT.view(torch.uint8).view(torch.int64).split(255, -1):
        count_B += words.sum(-1, keepdim=True).view(torch.uint8).sum(-1, dtype=torch.float32)
    return count_B


def any_unmasked(mask_BT: Tensor) -> Tensor:
    """(B,) bool: whether a row has an unmasked place at all."""
    mask_BT = as_mask(mask_BT)
    if not mask_BT.shape[-1]:
        return mask_BT.any(-1)
    return mask_BT.view(torch.uint8).amax(-1) > 0
