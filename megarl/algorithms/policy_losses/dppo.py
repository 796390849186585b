"""DPPO: a trust region in divergence instead of ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.bits import BitMask, zero_where_
from megarl.algorithms.checks import check_number
from megarl.algorithms.policy_losses.base import (
    POSSIBLE,
    PolicyLoss,
    clamped_log_ratio,
    mask_of,
    policy_loss,
    with_slope,
)

_REMAINDER = 1e-8  # least probability of "any other token", so that its log is finite


def check(truncate: float) -> None:
    check_number("truncate", truncate, above=0)


@policy_loss("dppo_tv", masked=True, check=check)
def dppo_tv(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    truncate: float = 20.0,
) -> PolicyLoss:
    """Divergence PPO, binary total variation (arXiv:2602.04879): the vocabulary is "this token or another".

        L = -sg[M min(r, truncate)] A log pi,   M = [pi - pi_old <= high] where A > 0, [pi_old - pi <= low] elsewhere

    low and high are differences of probabilities, not of ratios. ValueError on a truncate that is not above 0.
    """
    with torch.no_grad():
        mask = mask_of(
            mask_BT, log_probs_BT=log_probs_BT, old_log_probs_BT=old_log_probs_BT, advantages_BT=advantages_BT
        )
        advantages_BT = mask(advantages_BT)
        log_ratio_BT, inside_BT = clamped_log_ratio(log_probs_BT, old_log_probs_BT, mask)
        ratio_BT = log_ratio_BT.exp()
        change_BT = (ratio_BT - 1).mul_(mask(old_log_probs_BT).exp_())
        positive_BT = advantages_BT > 0
        outside_BT = (positive_BT & (change_BT > clip_high)) | (~positive_BT & (change_BT < -clip_low))
    return _outside_has_none(log_probs_BT, log_ratio_BT, ratio_BT, inside_BT, advantages_BT, mask, outside_BT, truncate)


@policy_loss("dppo_kl", masked=True, check=check)
def dppo_kl(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.05,
    clip_high: float = 0.05,
    truncate: float = 20.0,
) -> PolicyLoss:
    """Divergence PPO, binary KL (arXiv:2602.04879). As dppo_tv, with the divergence

        D = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))

    and M = 0 where the token has moved in the direction of its advantage and D > high (A > 0) or D > low (elsewhere).
    """
    with torch.no_grad():
        mask = mask_of(
            mask_BT, log_probs_BT=log_probs_BT, old_log_probs_BT=old_log_probs_BT, advantages_BT=advantages_BT
        )
        advantages_BT = mask(advantages_BT)
        log_ratio_BT, inside_BT = clamped_log_ratio(log_probs_BT, old_log_probs_BT, mask)
        ratio_BT = log_ratio_BT.exp()
        p_BT = mask(old_log_probs_BT).exp_()
        rest_BT = (1 - p_BT).clamp_(min=_REMAINDER)
        new_rest_BT = (1 - p_BT * ratio_BT).clamp_(min=_REMAINDER)
        divergence_BT = torch.div(rest_BT, new_rest_BT, out=new_rest_BT).log_().mul_(rest_BT)
        divergence_BT = divergence_BT.addcmul_(p_BT, log_ratio_BT, value=-1)
        positive_BT = advantages_BT > 0
        rising_BT = positive_BT & (log_ratio_BT > 0) & (divergence_BT > clip_high)
        falling_BT = ~positive_BT & (log_ratio_BT < 0) & (divergence_BT > clip_low)
        outside_BT = rising_BT | falling_BT
    return _outside_has_none(log_probs_BT, log_ratio_BT, ratio_BT, inside_BT, advantages_BT, mask, outside_BT, truncate)


def _outside_has_none(
    log_probs_BT: Tensor,
    log_ratio_BT: Tensor,
    ratio_BT: Tensor,
    inside_BT: Tensor,
    advantages_BT: Tensor,
    mask: BitMask,
    outside_BT: Tensor,
    truncate: float,
) -> PolicyLoss:
    check(truncate)
    with torch.no_grad():
        weight_BT = ratio_BT.clamp(max=truncate)
        truncated_BT = (weight_BT != ratio_BT) & ~outside_BT
        weight_BT = zero_where_(weight_BT.mul_(advantages_BT).neg_(), outside_BT)
        value_BT = mask(log_probs_BT).clamp_(min=POSSIBLE).mul_(weight_BT)
    loss_BT = with_slope(log_probs_BT, value_BT, weight_BT.mul_(inside_BT))
    return PolicyLoss(loss_BT, ratio_BT, outside_BT, truncated_BT, log_ratio_BT)
