"""An advantage and a policy loss of our own. Arguments come by name: a function takes those that it wants.

Offered to an advantage: `docs/algorithms.md`, section "Your own"; the same for a loss. Everything after the `*` is an option: it has
a default here, and a configuration may set it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from megarl.algorithms import Advantage, PolicyLoss
from megarl.algorithms.groups import Groups


def cautious(reward_BT: Tensor, mask_BT: Tensor, group_B: Sequence[Hashable], *, blame: float = 0.5) -> Advantage:
    """Score against the group's mean, where what is worse than the mean counts only `blame` times: A_i = s_i - mean_g, times
    `blame` if negative."""
    mask_BT = mask_BT > 0
    score_B = torch.where(mask_BT, reward_BT, 0.0).sum(-1)
    above_B = Groups(group_B, counts_B=mask_BT.any(-1)).centred(score_B)
    advantage_B = torch.where(above_B < 0, blame * above_B, above_B)
    advantages_BT = torch.where(mask_BT, advantage_B[:, None], 0.0)
    return Advantage(advantages_BT, advantages_BT)


def soft_clip(
    log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, width: float = 0.2
) -> PolicyLoss:
    """PPO's loss with a ratio that saturates in place of one that is cut off: L = -A (1 + w tanh((r - 1) / w)), w the width.

    At r = 1 its gradient is that of the policy gradient, and it fades with 1 / cosh^2 to either side. Masked inputs are 0 already.
    """
    ratio_BT = (log_probs_BT - old_log_probs_BT).clamp(-20.0, 20.0).exp()
    away_BT = (ratio_BT - 1) / width
    saturated_BT = away_BT.detach().abs() > 1  # told as the clip fraction
    return PolicyLoss(-advantages_BT * (1 + width * away_BT.tanh()), ratio_BT, saturated_BT)
