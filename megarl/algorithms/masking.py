"""What every formula here starts with: a mask that nothing passes, and ratios that cannot overflow."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: far from any real ratio, far from overflow


def as_mask(mask: Tensor) -> Tensor:
    """Bool: True where the mask is not 0."""
    return mask if mask.dtype == torch.bool else mask != 0


def working(values: Tensor) -> Tensor:
    """In the precision of statistics: float64 stays, everything else becomes float32."""
    return values if values.dtype == torch.float64 else values.float()


def keep(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The values in working precision, 0 where masked. No value and no gradient passes the mask, NaN and inf included:
    a product with the mask would let them through."""
    return torch.where(as_mask(mask_BT), working(values_BT), 0.0)


def log_ratio(log_probs_BT: Tensor, other_log_probs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log(p / q) of each token, within ±20, 0 where masked; a token beyond the limit has no gradient."""
    difference_BT = keep(working(log_probs_BT) - working(other_log_probs_BT), mask_BT)
    return difference_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
