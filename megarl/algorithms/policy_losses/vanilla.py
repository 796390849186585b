"""PPO's clipped loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.bits import zero_where_
from megarl.algorithms.policy_losses.base import PolicyLoss, clamped_log_ratio, mask_of, policy_loss, with_slope


@policy_loss("vanilla", masked=True)
def vanilla(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float | None = 3.0,
) -> PolicyLoss:
    """PPO's clipped loss (arXiv:1707.06347, eq. 7), asymmetric (arXiv:2503.14476, sec. 3.1), dual (arXiv:1912.09729).

    r = pi / pi_old, A the advantage:  L = max(-A r, -A clip(r, 1 - low, 1 + high)), and where A < 0 at most -A dual.
    dL/dlog pi = -A r = L where nothing is clipped, 0 elsewhere.
    """
    parts = clipped_parts(log_probs_BT, old_log_probs_BT, advantages_BT, mask_BT, clip_low, clip_high, clip_dual)
    loss_BT = with_slope(log_probs_BT, parts.value_BT, parts.slope_BT)
    return PolicyLoss(loss_BT, *parts[2:])


class Parts(NamedTuple):
    """(B, T) each, without gradient."""

    value_BT: Tensor
    slope_BT: Tensor  # d value / d log pi
    ratio_BT: Tensor
    clipped_BT: Tensor
    dual_clipped_BT: Tensor | None
    log_ratio_BT: Tensor


@torch.no_grad()
def clipped_parts(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None,
) -> Parts:
    """What vanilla is made of, for losses that change a part of it."""
    mask = mask_of(mask_BT, log_probs_BT=log_probs_BT, old_log_probs_BT=old_log_probs_BT, advantages_BT=advantages_BT)
    log_ratio_BT, inside_BT = clamped_log_ratio(log_probs_BT, old_log_probs_BT, mask)
    advantages_BT = mask(advantages_BT)
    ratio_BT = log_ratio_BT.exp()
    gain_BT = advantages_BT * ratio_BT
    held_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high).mul_(advantages_BT)
    clipped_BT, dual_clipped_BT = held_BT < gain_BT, None
    gain_BT = torch.minimum(gain_BT, held_BT, out=held_BT)
    flat_BT = clipped_BT
    if clip_dual is not None:
        least_BT = advantages_BT.clamp(max=0.0).mul_(clip_dual)
        dual_clipped_BT = gain_BT < least_BT
        gain_BT = torch.maximum(gain_BT, least_BT, out=least_BT)
        flat_BT = clipped_BT | dual_clipped_BT
    value_BT = gain_BT.neg_()
    slope_BT = zero_where_(inside_BT.mul_(value_BT), flat_BT)
    return Parts(value_BT, slope_BT, ratio_BT, clipped_BT, dual_clipped_BT, log_ratio_BT)
