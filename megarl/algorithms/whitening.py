"""Mean 0 and standard deviation 1 over a whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.masking import as_mask, working
from megarl.algorithms.rows import masked_sums, row_blocks, unmasked


@torch.no_grad()
def masked_whiten(
    values_BT: Tensor, mask_BT: Tensor, *, shift_mean: bool = True, eps: float = 1e-8, out_BT: Tensor | None = None
) -> Tensor:
    """(x - mean) / sqrt(var + eps) over all unmasked places, the variance with n - 1; 0 where masked.

    shift_mean False: the mean is added back. Exactly 0 (the mean, where it is added back) when all values are equal, and for
    a single one. out_BT: where to write the result, may be values_BT itself.
    """
    mask_BT, values_BT = as_mask(mask_BT), working(values_BT)
    result_BT = torch.empty_like(values_BT, memory_format=torch.contiguous_format) if out_BT is None else out_BT
    if not values_BT.numel():
        return result_BT
    count = unmasked(mask_BT).to(values_BT.dtype).sum()
    mean = masked_sums(values_BT, mask_BT).sum() / count.clamp(min=1)
    lowest, highest = _bounds(values_BT, mask_BT)
    unit = _unit(lowest, mean, highest)
    squares = torch.zeros_like(mean)
    for rows in row_blocks(values_BT):
        distance = torch.where(mask_BT[rows], values_BT[rows], mean).sub_(mean).div_(unit)
        squares += distance.square_().sum()
    scale = _scale(squares / (count - 1).clamp(min=1), unit, eps) * (lowest < highest)
    back, zero = torch.zeros_like(mean) if shift_mean else mean, torch.zeros_like(mean)
    for rows in row_blocks(values_BT):
        whitened = (values_BT[rows] - mean).mul_(scale).add_(back)
        torch.where(mask_BT[rows], whitened, zero, out=result_BT[rows])
    return result_BT


def weighted_whiten(values_B: Tensor, weight_B: Tensor, *, eps: float = 1e-8) -> Tensor:
    """What `masked_whiten` makes of values that stand there weight_B times each; 0 where that is not at all."""
    if not len(values_B):
        return values_B
    counts_B = weight_B > 0
    values_B, weight_B = torch.where(counts_B, values_B, 0.0), weight_B.to(values_B.dtype)
    count = weight_B.sum()
    mean = (weight_B * values_B).sum() / count.clamp(min=1)
    lowest, highest = _bounds(values_B[:, None], counts_B[:, None])
    unit = _unit(lowest, mean, highest)
    squares = (weight_B * ((values_B - mean) / unit).square()).sum()
    scale = _scale(squares / (count - 1).clamp(min=1), unit, eps) * (lowest < highest)
    return torch.where(counts_B, (values_B - mean) * scale, 0.0)


def _bounds(values_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and highest unmasked value; inf and -inf where there is none."""
    infinity = torch.full((), float("inf"), dtype=values_BT.dtype, device=values_BT.device)
    lowest, highest = infinity, -infinity
    for rows in row_blocks(values_BT):
        lowest = torch.minimum(lowest, torch.where(mask_BT[rows], values_BT[rows], infinity).amin())
        highest = torch.maximum(highest, torch.where(mask_BT[rows], values_BT[rows], -infinity).amax())
    return lowest, highest


def _unit(lowest: Tensor, mean: Tensor, highest: Tensor) -> Tensor:
    """A unit in which no squared distance to the mean overflows."""
    return torch.where(lowest <= highest, torch.maximum(highest - mean, mean - lowest), 1.0).clamp(min=1)


def _scale(variance_in_units: Tensor, unit: Tensor, eps: float) -> Tensor:
    return 1 / (unit * (variance_in_units + eps / unit.square()).sqrt())
