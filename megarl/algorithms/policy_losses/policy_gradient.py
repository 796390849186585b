"""The policy gradient itself: nothing is compared with the policy that sampled, nothing is clipped."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.bits import BitMask
from megarl.algorithms.policy_losses.base import POSSIBLE, PolicyLoss, policy_loss, with_slope


@policy_loss("reinforce", masked=True, aggregation="seq_mean_token_sum")
def reinforce(log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> PolicyLoss:
    """L = -A log pi, summed over a sequence (Williams 1992, doi:10.1007/BF00992696); dL/dlog pi = -A.

    Off-policy it needs correction weights: there is no ratio in it. A token whose probability is 0 in float32 has no gradient.
    """
    with torch.no_grad():
        mask = BitMask(mask_BT)
        slope_BT = mask(advantages_BT).neg_()
        true_BT = mask(log_probs_BT)
        held_BT = true_BT.clamp(min=POSSIBLE)
        value_BT = slope_BT * held_BT
        slope_BT = slope_BT.mul_(held_BT.eq_(true_BT))
    return PolicyLoss(with_slope(log_probs_BT, value_BT, slope_BT))


@policy_loss("gpg", masked=True)
def gpg(log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> PolicyLoss:
    """Group Policy Gradient, L = -A log pi by token mean (arXiv:2504.02546); its advantages are `gpg`'s."""
    return reinforce(log_probs_BT, advantages_BT, mask_BT)
