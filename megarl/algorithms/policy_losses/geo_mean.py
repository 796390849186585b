"""GMPO: the geometric mean of a sequence's clipped ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.policy_losses.base import (
    PolicyLoss,
    clamped_log_ratio,
    mask_of,
    policy_loss,
    sequence_mean,
    with_slope,
)


@policy_loss("geo_mean", masked=True, aggregation="seq_mean_token_mean")
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
    with torch.no_grad():
        mask = mask_of(
            mask_BT, log_probs_BT=log_probs_BT, old_log_probs_BT=old_log_probs_BT, advantages_BT=advantages_BT
        )
        log_ratio_BT, inside_BT = clamped_log_ratio(log_probs_BT, old_log_probs_BT, mask)
        advantages_BT = mask(advantages_BT)
        held_BT = log_ratio_BT.clamp(-clip_low, clip_high)
        outside_BT = held_BT != log_ratio_BT
        clipped_BT, dual_clipped_BT = outside_BT & (advantages_BT > 0), outside_BT & (advantages_BT < 0)
        sign_BT = advantages_BT.sign()
        gain_BT, held_BT = log_ratio_BT * sign_BT, held_BT.mul_(sign_BT)
        slope_BT = inside_BT.mul_(torch.le(gain_BT, held_BT, out=torch.empty_like(gain_BT))).mul_(sign_BT).mul_(sign_BT)
        taken_BT = torch.minimum(gain_BT, held_BT, out=held_BT).mul_(sign_BT)
    ratio_B = sequence_mean(with_slope(log_probs_BT, taken_BT, slope_BT), mask.bool_BT).exp()
    loss_B = -sequence_mean(advantages_BT, mask.bool_BT) * ratio_B
    loss_BT, ratio_BT = (each_B[:, None].expand_as(mask.bool_BT) for each_B in (loss_B, ratio_B.detach()))
    return PolicyLoss(mask(loss_BT), ratio_BT, clipped_BT, dual_clipped_BT, log_ratio_BT)
