"""DRO: a quadratic penalty on the log-ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.checks import check_number
from megarl.algorithms.policy_losses.base import (
    POSSIBLE,
    PolicyLoss,
    clamped_log_ratio,
    mask_of,
    policy_loss,
    with_slope,
)


def check(beta: float) -> None:
    check_number("beta", beta, above=0)


@policy_loss("dro", masked=True, check=check)
def dro(
    log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, beta: float = 0.05
) -> PolicyLoss:
    """Direct Reward Optimisation (arXiv:2405.19107; by token and online as in arXiv:2501.12599, sec. 2.3.2):

        L = -A log pi + beta / 2 d^2,   d = log(pi / pi_old),   dL/dlog pi = -A + beta d

    ValueError on a beta that is not above 0.
    """
    check(beta)
    with torch.no_grad():
        mask = mask_of(
            mask_BT, log_probs_BT=log_probs_BT, old_log_probs_BT=old_log_probs_BT, advantages_BT=advantages_BT
        )
        log_ratio_BT, inside_BT = clamped_log_ratio(log_probs_BT, old_log_probs_BT, mask)
        weight_BT = mask(advantages_BT).neg_()
        value_BT = mask(log_probs_BT).clamp_(min=POSSIBLE).mul_(weight_BT)
        value_BT = value_BT.addcmul_(log_ratio_BT, log_ratio_BT, value=beta / 2)
        slope_BT = weight_BT.add_(log_ratio_BT, alpha=beta).mul_(inside_BT)
    return PolicyLoss(with_slope(log_probs_BT, value_BT, slope_BT), log_ratio_BT=log_ratio_BT)
