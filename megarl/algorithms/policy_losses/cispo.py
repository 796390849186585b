"""CISPO: the weight is clipped, no token loses its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.policy_losses.base import (
    POSSIBLE,
    PolicyLoss,
    clamped_log_ratio,
    mask_of,
    policy_loss,
    with_slope,
)


@policy_loss("cispo", masked=True)
def cispo(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
) -> PolicyLoss:
    """Clipped importance-sampling weight policy optimization (arXiv:2506.13585, eq. 4-5):

        L = -sg[clip(r, 1 - low, 1 + high)] A log pi

    The paper sets no lower bound (low 1). clipped: tokens whose weight the clip changed; they keep their gradient.
    """
    with torch.no_grad():
        mask = mask_of(
            mask_BT, log_probs_BT=log_probs_BT, old_log_probs_BT=old_log_probs_BT, advantages_BT=advantages_BT
        )
        log_ratio_BT, inside_BT = clamped_log_ratio(log_probs_BT, old_log_probs_BT, mask)
        ratio_BT = log_ratio_BT.exp()
        weight_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
        clipped_BT = weight_BT != ratio_BT
        weight_BT = weight_BT.mul_(mask(advantages_BT)).neg_()
        value_BT = mask(log_probs_BT).clamp_(min=POSSIBLE).mul_(weight_BT)
    loss_BT = with_slope(log_probs_BT, value_BT, weight_BT.mul_(inside_BT))
    return PolicyLoss(loss_BT, ratio_BT, clipped_BT, log_ratio_BT=log_ratio_BT)
