"""SAPO: a smooth gate in place of the clip."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.checks import check_number
from megarl.algorithms.policy_losses.base import PolicyLoss, clamped_log_ratio, mask_of, policy_loss, with_slope


def check(tau_positive: float, tau_negative: float) -> None:
    check_number("tau_positive", tau_positive, above=0)
    check_number("tau_negative", tau_negative, above=0)


@policy_loss("sapo", masked=True, check=check, aggregation="seq_mean_token_mean")
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

    tau_positive where A > 0, tau_negative elsewhere; the larger, the sooner the gradient fades. With s the sigmoid,
    dL/dlog pi = -4 A s (1 - s) r: on-policy -A, the policy gradient. ValueError on a tau that is not above 0.
    """
    check(tau_positive, tau_negative)
    with torch.no_grad():
        mask = mask_of(
            mask_BT, log_probs_BT=log_probs_BT, old_log_probs_BT=old_log_probs_BT, advantages_BT=advantages_BT
        )
        log_ratio_BT, inside_BT = clamped_log_ratio(log_probs_BT, old_log_probs_BT, mask)
        ratio_BT = log_ratio_BT.exp()
        weight_BT = mask(advantages_BT)
        tau_BT = torch.gt(weight_BT, 0.0, out=torch.empty_like(weight_BT))
        tau_BT.mul_(tau_positive - tau_negative).add_(tau_negative)
        gate_BT = (ratio_BT - 1).mul_(tau_BT).sigmoid_()
        value_BT = weight_BT.mul_(-4).mul_(gate_BT)
        slope_BT = inside_BT.mul_(ratio_BT).mul_(gate_BT.neg_().add_(1)).mul_(value_BT)
    loss_BT = with_slope(log_probs_BT, value_BT.div_(tau_BT), slope_BT)
    return PolicyLoss(loss_BT, ratio_BT, log_ratio_BT=log_ratio_BT)
