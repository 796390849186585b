"""The policy gradient itself: nothing is compared with the policy that sampled, nothing is clipped."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.policy_losses.base import POSSIBLE, PolicyLoss, mask_of, policy_loss, with_slope


@policy_loss("reinforce", masked=True, aggregation="seq_mean_token_sum")
def reinforce(log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> PolicyLoss:
    """L = -A log pi, summed over a sequence (Williams 1992, doi:10.1007/BF00992696); dL/dlog pi = -A.

    Off-policy it needs correction weights: there is no ratio in it. A token whose probability is 0 in float32 has no gradient.
    """
    with torch.no_grad():
        mask = mask_of(mask_BT, log_probs_BT=log_probs_BT, advantages_BT=advantages_BT)
        slope_BT = mask(advantages_BT).neg_()
        log_probs_kept_BT = mask(log_probs_BT)
        held_BT = log_probs_kept_BT.clamp(min=POSSIBLE)
        possible_BT = log_probs_kept_BT.eq_(held_BT)
        value_BT, slope_BT = held_BT.mul_(slope_BT), slope_BT.mul_(possible_BT)
    return PolicyLoss(with_slope(log_probs_BT, value_BT, slope_BT))


@policy_loss("gpg", masked=True)
def gpg(log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> PolicyLoss:
    """Group Policy Gradient, L = -A log pi by token mean (arXiv:2504.02546); its advantages are `gpg`'s."""
    return reinforce(log_probs_BT, advantages_BT, mask_BT)
