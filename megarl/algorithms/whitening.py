"""Mean 0 and standard deviation 1 over a whole batch."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.groups import ULPS
from megarl.algorithms.masking import as_mask, working
from megarl.algorithms.rows import any_unmasked, blocks, fill_masked, masked, masked_sums, unmasked


@torch.no_grad()
def masked_whiten(
    values_BT: Tensor, mask_BT: Tensor, *, shift_mean: bool = True, eps: float = 1e-8, out_BT: Tensor | None = None
) -> Tensor:
    """(x - mean) / sqrt(var + eps) over all unmasked places, the variance with n - 1; 0 where masked.

    shift_mean False: the mean is added back. Exactly 0 (the mean, where it is added back) when all values are equal but for
    rounding, and for a single one. ValueError where they are not finite, or too far apart for their precision. out_BT: where
    to write the result, may be values_BT itself.
    """
    mask_BT, values_BT = as_mask(mask_BT), working(values_BT)
    result_BT = torch.empty_like(values_BT, memory_format=torch.contiguous_format) if out_BT is None else out_BT
    if not values_BT.numel():
        return result_BT
    count = unmasked(mask_BT).double().sum().to(values_BT.dtype)
    mean = (masked_sums(values_BT, mask_BT).double().sum() / count.clamp(min=1)).to(values_BT.dtype)
    lowest, highest = _bounds(values_BT, mask_BT)
    if bool((count > 0) & ~(highest - lowest + mean.abs()).isfinite()):
        extent = f"from {float(lowest):g} to {float(highest):g}"
        raise ValueError(
            f"what is to be whitened is {extent}: their sum or distance is too large for {values_BT.dtype}"
        )
    unit = _unit(lowest, mean, highest)
    squares = torch.zeros_like(mean)
    for rows, width in blocks(mask_BT):
        distance = masked(values_BT[rows, :width] - mean, mask_BT[rows, :width]).div_(unit)
        squares += distance.square_().sum()
    scale = _scale(squares / (count - 1).clamp(min=1), unit, eps) * _differ(lowest, highest, values_BT.dtype)
    back = torch.zeros_like(mean) if shift_mean else mean

    def whitened(rows: slice, width: int) -> Tensor:
        return (values_BT[rows, :width] - mean).mul_(scale).add_(back)

    return fill_masked(result_BT, mask_BT, whitened)


def weighted_whiten(
    values_B: Tensor, weight_B: Tensor, *, eps: float = 1e-8, precision: torch.dtype | None = None
) -> Tensor:
    """What `masked_whiten` makes of values that stand there weight_B times each; 0 where that is not at all.

    precision: that of what the values were made from, by which they count as equal; None: their own.
    """
    if not len(values_B):
        return values_B
    counts_B = weight_B > 0
    values_B, weight_B = torch.where(counts_B, values_B, 0.0), weight_B.to(values_B.dtype)
    count = weight_B.sum()
    mean = (weight_B * values_B).sum() / count.clamp(min=1)
    lowest, highest = _bounds(values_B[:, None], counts_B[:, None])
    unit = _unit(lowest, mean, highest)
    squares = (weight_B * ((values_B - mean) / unit).square()).sum()
    scale = _scale(squares / (count - 1).clamp(min=1), unit, eps) * _differ(
        lowest, highest, precision or values_B.dtype
    )
    return torch.where(counts_B, (values_B - mean) * scale, 0.0)


def _bounds(values_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and highest unmasked value; of no meaning where there is none."""
    row = any_unmasked(mask_BT).to(torch.uint8).argmax()
    lowest = highest = values_BT[row, mask_BT[row].to(torch.uint8).argmax()]  # one of them
    for rows, width in blocks(mask_BT):
        if width:
            filled = torch.where(mask_BT[rows, :width], values_BT[rows, :width], lowest)
            lowest, highest = torch.minimum(lowest, filled.amin()), torch.maximum(highest, filled.amax())
    return lowest, highest


def _differ(lowest: Tensor, highest: Tensor, precision: torch.dtype) -> Tensor:
    """Bool: they are further apart than rounding makes equal numbers; else whitening would make advantages of that."""
    return highest - lowest > ULPS * torch.finfo(precision).eps * torch.maximum(highest, -lowest)


def _unit(lowest: Tensor, mean: Tensor, highest: Tensor) -> Tensor:
    """A unit in which no squared distance to the mean overflows."""
    return torch.where(lowest <= highest, torch.maximum(highest - mean, mean - lowest), 1.0).clamp(min=1)


def _scale(variance_in_units: Tensor, unit: Tensor, eps: float) -> Tensor:
    return 1 / (unit * (variance_in_units + eps / unit.square()).sqrt())
