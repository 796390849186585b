"""GSPO: one ratio a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.bits import zero_where_
from megarl.algorithms.policy_losses.base import (
    PolicyLoss,
    clamped_log_ratio,
    mask_of,
    policy_loss,
    sequence_mean,
    with_slope,
)


@policy_loss("gspo_token", masked=True, aggregation="seq_mean_token_mean")
@policy_loss("gspo", masked=True, aggregation="seq_mean_token_mean")
def gspo(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> PolicyLoss:
    """Group Sequence Policy Optimization and its token variant (arXiv:2507.18071, eq. 5-7 and 13-14).

    Of a sequence of n tokens, s = exp(1/n sum_t log(pi / pi_old));  L_t = max(-A_t s_t, -A_t clip(s_t, 1 - low, 1 + high))
    with s_t = s in value, and the gradient of log pi_t alone: s_t = sg[s] pi_t / sg[pi_t].

    That is the token variant. With one advantage a sequence, which is what GSPO has, value and gradient are GSPO's own
    (sec. 4.3): hence one function under both names. The clip is that of a sequence's ratio, far narrower than a token's.
    """
    with torch.no_grad():
        mask = mask_of(
            mask_BT, log_probs_BT=log_probs_BT, old_log_probs_BT=old_log_probs_BT, advantages_BT=advantages_BT
        )
        log_ratio_BT, inside_BT = clamped_log_ratio(log_probs_BT, old_log_probs_BT, mask)
        advantages_BT = mask(advantages_BT)
        ratio_B1 = sequence_mean(log_ratio_BT, mask.bool_BT).exp()[:, None]
        gain_BT = advantages_BT * ratio_B1
        held_BT = advantages_BT * ratio_B1.clamp(1 - clip_low, 1 + clip_high)
        clipped_BT = held_BT < gain_BT
        value_BT = torch.minimum(gain_BT, held_BT, out=held_BT).neg_()
        slope_BT = zero_where_(inside_BT.mul_(value_BT), clipped_BT)
    loss_BT = with_slope(log_probs_BT, value_BT, slope_BT)
    return PolicyLoss(loss_BT, ratio_B1.expand_as(loss_BT), clipped_BT, log_ratio_BT=log_ratio_BT)
