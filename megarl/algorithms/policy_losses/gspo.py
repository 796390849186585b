"""GSPO: one ratio a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.masking import as_mask, keep, log_ratio
from megarl.algorithms.policy_losses.base import PolicyLoss, policy_loss, sequence_mean


@policy_loss("gspo_token", aggregation="seq_mean_token_mean")
@policy_loss("gspo", aggregation="seq_mean_token_mean")
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
    mask_BT = as_mask(mask_BT)
    log_ratio_BT = log_ratio(log_probs_BT, old_log_probs_BT, mask_BT)
    advantages_BT = keep(advantages_BT, mask_BT)
    with torch.no_grad():
        ratio_B1 = sequence_mean(log_ratio_BT, mask_BT).exp()[:, None]
        too_high_B1, too_low_B1 = ratio_B1 > 1 + clip_high, ratio_B1 < 1 - clip_low
        clipped_BT = (advantages_BT > 0) & too_high_B1 | (advantages_BT < 0) & too_low_B1
        value_BT = -advantages_BT * torch.where(clipped_BT, ratio_B1.clamp(1 - clip_low, 1 + clip_high), ratio_B1)
        slope_BT = value_BT.masked_fill(clipped_BT, 0.0)
    # d - sg[d] is 0 and has the gradient of log pi, 0 where the token's own ratio is clamped.
    loss_BT = torch.addcmul(value_BT, slope_BT, log_ratio_BT - log_ratio_BT.detach())
    return PolicyLoss(loss_BT, ratio_B1.expand_as(mask_BT), clipped_BT)
