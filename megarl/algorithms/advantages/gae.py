"""Generalised advantage estimation, for a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.advantages.base import Advantage, advantage, check_finite, check_shape, scores
from megarl.algorithms.advantages.options import check_bools, check_fraction
from megarl.algorithms.masking import as_mask
from megarl.algorithms.rows import masked_sums
from megarl.algorithms.scan import decaying_sum, over_tokens
from megarl.algorithms.whitening import masked_whiten


@advantage("gae")
@torch.no_grad()
def gae(
    reward_BT: Tensor,
    mask_BT: Tensor,
    values_BT: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> Advantage:
    """A_t = delta_t + gamma lam A_n, delta_t = r_t + gamma V_n - V_t, n the next unmasked token, A and V 0 after the last
    (arXiv:1506.02438, eq. 16). returns_t = A_t + V_t.

    Observation tokens in the middle of a response are skipped: value and advantage carry over them undiscounted.
    whiten: the advantages, not the returns, get mean 0 and standard deviation 1 over the batch's tokens.
    """
    gamma, lam = check_fraction("gae", "gamma", gamma), check_fraction("gae", "lam", lam)
    check_bools("gae", whiten=whiten)
    mask_BT = as_mask(mask_BT)
    check_shape("values_BT", values_BT, mask_BT)
    check_finite("score", scores(reward_BT, mask_BT))
    check_finite("sum of values_BT", masked_sums(values_BT, mask_BT))

    def formula(reward: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        delta = reward.sub_(value)
        delta[:, :-1].add_(value[:, 1:], alpha=gamma)
        advantages = decaying_sum(delta, gamma * lam)
        return advantages, advantages + value

    advantages_BT, returns_BT = over_tokens(formula, (reward_BT, values_BT), mask_BT, outputs=2)
    if whiten:
        masked_whiten(advantages_BT, mask_BT, out_BT=advantages_BT)
    return Advantage(advantages_BT, returns_BT)
