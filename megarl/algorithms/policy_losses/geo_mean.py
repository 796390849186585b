"""GMPO: the geometric mean of a sequence's clipped ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.masking import as_mask, keep, log_ratio
from megarl.algorithms.policy_losses.base import PolicyLoss, policy_loss, sequence_mean


@policy_loss("geo_mean", aggregation="seq_mean_token_mean")
def geo_mean(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> PolicyLoss:
    """Geometric-Mean Policy Optimization (arXiv:2507.20673). Of a sequence of n tokens, d_t = log(pi / pi_old):

        L = -A exp(1/n sum_t d'_t),  d'_t = min(d_t, high) where A_t > 0, max(d_t, -low) where A_t < 0, 0 where A_t = 0

    A is the mean of the sequence's advantages, of which the paper has one. The clip is in log space: exp(-low)..exp(high).
    Each token holds its sequence's L, so `seq_mean_token_mean`, its own aggregation, is the mean over sequences.
    clipped: outside low..high in either direction where A_t > 0, dual_clipped: where A_t < 0 (as other libraries count).
    """
    mask_BT = as_mask(mask_BT)
    log_ratio_BT = log_ratio(log_probs_BT, old_log_probs_BT, mask_BT)
    advantages_BT = keep(advantages_BT, mask_BT)
    positive_BT, negative_BT = advantages_BT > 0, advantages_BT < 0
    with torch.no_grad():
        infinity = log_ratio_BT.new_tensor(torch.inf)
        lowest_BT = torch.where(negative_BT, infinity.new_tensor(-clip_low), torch.where(positive_BT, -infinity, 0.0))
        highest_BT = torch.where(positive_BT, infinity.new_tensor(clip_high), torch.where(negative_BT, infinity, 0.0))
        outside_BT = (log_ratio_BT < -clip_low) | (log_ratio_BT > clip_high)
    ratio_B = sequence_mean(log_ratio_BT.clamp(lowest_BT, highest_BT), mask_BT).exp()
    loss_B = -sequence_mean(advantages_BT, mask_BT) * ratio_B
    return PolicyLoss(
        loss_B[:, None].expand_as(mask_BT),
        ratio_B[:, None].expand_as(mask_BT),
        outside_BT & positive_BT,
        outside_BT & negative_BT,
    )
