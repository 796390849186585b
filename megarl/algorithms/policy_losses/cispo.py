"""CISPO: the weight is clipped, no token loses its gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.masking import as_mask, keep
from megarl.algorithms.policy_losses.base import PolicyLoss, clamped_log_ratio, policy_loss


@policy_loss("cispo")
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
    log_ratio_BT, inside_BT = clamped_log_ratio(log_probs_BT, old_log_probs_BT, as_mask(mask_BT))
    with torch.no_grad():
        ratio_BT = log_ratio_BT.exp()
        clipped_BT = (ratio_BT < 1 - clip_low) | (ratio_BT > 1 + clip_high)
        weight_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high).mul_(keep(advantages_BT, mask_BT)).neg_()
    return PolicyLoss(weight_BT * keep(log_probs_BT, inside_BT), ratio_BT, clipped_BT)
