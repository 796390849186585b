"""SAPO: a smooth gate in place of the clip."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.masking import keep, log_ratio
from megarl.algorithms.policy_losses.base import PolicyLoss, policy_loss


@policy_loss("sapo", aggregation="seq_mean_token_mean")
def sapo(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> PolicyLoss:
    """Soft Adaptive Policy Optimization (arXiv:2511.20347): L = -A f(r), f(r) = 4 / tau sigmoid(tau (r - 1)).

    tau_positive where A > 0, tau_negative elsewhere; the larger, the sooner the gradient fades. f'(1) = 1: on-policy it
    is the policy gradient. ValueError on a tau that is not above 0.
    """
    if min(tau_positive, tau_negative) <= 0:
        raise ValueError(f"tau_positive is {tau_positive} and tau_negative {tau_negative}; both must be above 0")
    ratio_BT = log_ratio(log_probs_BT, old_log_probs_BT, mask_BT).exp()
    advantages_BT = keep(advantages_BT, mask_BT)
    with torch.no_grad():
        positive, negative = (ratio_BT.new_tensor(tau) for tau in (tau_positive, tau_negative))
        tau_BT = torch.where(advantages_BT > 0, positive, negative)
        weight_BT = advantages_BT.mul(-4).div_(tau_BT)
    gate_BT = torch.sigmoid((ratio_BT - 1) * tau_BT)
    return PolicyLoss(weight_BT * gate_BT, ratio_BT.detach())
