"""PPO's clipped loss."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.masking import keep, log_ratio
from megarl.algorithms.policy_losses.base import PolicyLoss, policy_loss


@policy_loss("vanilla")
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
    Written as it acts, L = -A r' with r' = min(r, 1 + high) where A >= 0, min(max(r, 1 - low), dual) where A < 0.
    """
    ratio_BT = log_ratio(log_probs_BT, old_log_probs_BT, mask_BT).exp()
    advantages_BT = keep(advantages_BT, mask_BT)
    negative_BT = advantages_BT < 0
    dual = float("inf") if clip_dual is None else clip_dual
    lower_BT = torch.where(negative_BT, ratio_BT.new_tensor(1 - clip_low), ratio_BT.new_tensor(0.0))
    upper_BT = torch.where(negative_BT, ratio_BT.new_tensor(dual), ratio_BT.new_tensor(1 + clip_high))
    with torch.no_grad():
        dual_clipped_BT = negative_BT & (ratio_BT > dual)
        too_high_BT = (advantages_BT > 0) & (ratio_BT > upper_BT)
        clipped_BT = too_high_BT | negative_BT & (ratio_BT < lower_BT)
    return PolicyLoss(-advantages_BT * ratio_BT.clamp(lower_BT, upper_BT), ratio_BT, clipped_BT, dual_clipped_BT)
