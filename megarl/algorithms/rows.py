"""Work on a (B, T) tensor a few rows at a time, so that what lies between input and output stays in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megarl.algorithms.masking import as_mask, working

# 4 MiB of float32. A temporary of 8192 x 1024 costs more in fresh pages than all the arithmetic on it; smaller blocks cost
# more calls, each of which waits for all threads, which is dear where other processes use the cores.
ELEMENTS = 1 << 20


def row_blocks(like_BT: Tensor) -> Iterator[slice]:
    """Slices of rows that cover the tensor; on a GPU, where memory is pooled and launches cost, one slice."""
    rows, columns = like_BT.shape
    step = max(1, ELEMENTS // max(columns, 1)) if like_BT.device.type == "cpu" else max(rows, 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def masked_sums(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B,) each row's sum over unmasked places, in working precision."""
    mask_BT = as_mask(mask_BT)
    dtype = torch.float64 if values_BT.dtype == torch.float64 else torch.float32
    sum_B = torch.empty(len(values_BT), dtype=dtype, device=values_BT.device)
    zero = torch.zeros((), dtype=dtype, device=values_BT.device)
    for rows in row_blocks(values_BT):
        sum_B[rows] = torch.where(mask_BT[rows], working(values_BT[rows]), zero).sum(-1)
    return sum_B


def unmasked(mask_BT: Tensor) -> Tensor:
    """(B,) float32: how many places of each row are unmasked; exact up to 2^24."""
    mask_BT = as_mask(mask_BT)
    count_B = torch.empty(len(mask_BT), device=mask_BT.device)
    for rows in row_blocks(mask_BT):
        count_B[rows] = mask_BT[rows].float().sum(-1)  # several times the speed of a sum over bools
    return count_B


def any_unmasked(mask_BT: Tensor) -> Tensor:
    """(B,) bool: whether a row has an unmasked place at all."""
    mask_BT = as_mask(mask_BT)
    if not mask_BT.shape[-1]:
        return mask_BT.any(-1)
    return mask_BT.view(torch.uint8).amax(-1) > 0  # `any` over bools is not vectorised
