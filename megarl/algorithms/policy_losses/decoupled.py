"""Decoupled PPO: the policy that sampled is not the one that the update stays near."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.masking import as_mask
from megarl.algorithms.policy_losses.base import PolicyLoss, clamped_log_ratio, policy_loss
from megarl.algorithms.policy_losses.vanilla import vanilla


@policy_loss("decoupled")
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
    engine sampled with. A weight above behaviour_cap (None: beyond the limit of ratios, exp(20)) is 0, and so is its token.
    """
    plain = vanilla(
        log_probs_BT,
        old_log_probs_BT,
        advantages_BT,
        mask_BT,
        clip_low=clip_low,
        clip_high=clip_high,
        clip_dual=clip_dual,
    )
    log_weight_BT, inside_BT = clamped_log_ratio(old_log_probs_BT, behaviour_log_probs_BT, as_mask(mask_BT))
    with torch.no_grad():
        weight_BT = log_weight_BT.exp_()
        used_BT = inside_BT if behaviour_cap is None else inside_BT & (weight_BT <= behaviour_cap)
        weight_BT = torch.where(used_BT, weight_BT, 0.0)
    return plain._replace(loss_BT=plain.loss_BT * weight_BT)
