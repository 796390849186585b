"""Decoupled PPO: the policy that sampled is not the one that the update stays near."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.checks import check_number
from megarl.algorithms.policy_losses.base import PolicyLoss, clamped_log_ratio, mask_of, policy_loss, with_slope
from megarl.algorithms.policy_losses.vanilla import clipped_parts


def check(behaviour_cap: float | None) -> None:
    check_number("behaviour_cap", behaviour_cap, above=0, none=True)


@policy_loss("decoupled", masked=True, check=check)
def decoupled(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    behaviour_log_probs_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = 3.0,
    behaviour_cap: float | None = None,
) -> PolicyLoss:
    """Decoupled PPO (arXiv:2110.00641; for stale samples arXiv:2505.24298, sec. 5.2):

        L = sg[pi_prox / pi_behave] PPO(pi / pi_prox)

    old_log_probs are those of the proximal policy, the one before this step's updates; behaviour_log_probs those that the
    engine sampled with. A weight above behaviour_cap, or beyond the limit of ratios, is 0: such a token does not take part.
    ValueError on a behaviour_cap that is not above 0.
    """
    check(behaviour_cap)
    with torch.no_grad():
        mask = mask_of(mask_BT, old_log_probs_BT=old_log_probs_BT, behaviour_log_probs_BT=behaviour_log_probs_BT)
        log_weight_BT, inside_BT = clamped_log_ratio(old_log_probs_BT, behaviour_log_probs_BT, mask)
        weight_BT = log_weight_BT.exp_().mul_(inside_BT)
        if behaviour_cap is not None:
            weight_BT.mul_(torch.le(weight_BT, behaviour_cap, out=inside_BT))
        parts = clipped_parts(log_probs_BT, old_log_probs_BT, advantages_BT, mask_BT, clip_low, clip_high, clip_dual)
    loss_BT = with_slope(log_probs_BT, parts.value_BT.mul_(weight_BT), parts.slope_BT.mul_(weight_BT))
    return PolicyLoss(loss_BT, *parts[2:])
