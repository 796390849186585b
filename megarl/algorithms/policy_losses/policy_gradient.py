"""The policy gradient itself: nothing is compared with the policy that sampled, nothing is clipped."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.masking import as_mask, keep, log_ratio
from megarl.algorithms.policy_losses.base import PolicyLoss, policy_loss

_IMPOSSIBLE = -104.0  # exp of it is 0 in float32


@policy_loss("reinforce", aggregation="seq_mean_token_sum")
def reinforce(log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> PolicyLoss:
    """L = -A log pi, summed over a sequence (Williams 1992, doi:10.1007/BF00992696).

    Off-policy it needs correction weights: there is no ratio in it. A token whose probability
    is 0 in float32 has no loss and no gradient.
    """
    possible_BT = as_mask(mask_BT) & ~(log_probs_BT < _IMPOSSIBLE)  # an unmasked NaN is a bug and must not vanish
    loss_BT = -keep(advantages_BT, mask_BT) * keep(log_probs_BT, possible_BT)
    with torch.no_grad():
        ratio_BT = log_ratio(log_probs_BT, old_log_probs_BT, mask_BT).exp_()
    return PolicyLoss(loss_BT, ratio_BT)


@policy_loss("gpg")
def gpg(log_probs_BT: Tensor, old_log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> PolicyLoss:
    """Group Policy Gradient, L = -A log pi by token mean (arXiv:2504.02546); its advantages are `gpg`'s."""
    return reinforce(log_probs_BT, old_log_probs_BT, advantages_BT, mask_BT)
