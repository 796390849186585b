"""DRO: a quadratic penalty on the log-ratio."""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.masking import as_mask, keep, log_ratio
from megarl.algorithms.policy_losses.base import PolicyLoss, clamped_log_ratio, policy_loss


@policy_loss("dro")
def dro(
    log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, beta: float = 0.05
) -> PolicyLoss:
    """Direct Reward Optimisation (arXiv:2405.19107; by token and online as in arXiv:2501.12599, sec. 2.3.2):

        L = -A log pi + beta / 2 log(pi / pi_old)^2

    ValueError on a beta that is not above 0.
    """
    if beta <= 0:
        raise ValueError(f"beta is {beta}; it must be above 0")
    ratio_BT, inside_BT = clamped_log_ratio(log_probs_BT, old_log_probs_BT, as_mask(mask_BT))
    penalty_BT = log_ratio(log_probs_BT, old_log_probs_BT, mask_BT).square() * (beta / 2)
    return PolicyLoss(penalty_BT - keep(advantages_BT, mask_BT) * keep(log_probs_BT, inside_BT), ratio_BT.exp_())
