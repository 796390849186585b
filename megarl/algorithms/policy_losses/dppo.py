"""DPPO: a trust region in divergence instead of ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.masking import as_mask, keep
from megarl.algorithms.policy_losses.base import PolicyLoss, clamped_log_ratio, policy_loss

_IMPOSSIBLE = -100.0  # exp(-100) is 0 in float32: the log of such a probability need not be infinite
_REMAINDER = 1e-8  # least probability of "any other token", so that its log is finite


@policy_loss("dppo_tv")
def dppo_tv(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    truncate: float = 20.0,
) -> PolicyLoss:
    """Divergence PPO, binary total variation (arXiv:2602.04879): the vocabulary is "this token or another".

        L = -sg[M min(r, truncate)] A log pi,   M = [pi - pi_old <= high] where A > 0, [pi_old - pi <= low] elsewhere

    low and high are differences of probabilities, not of ratios.
    """
    with torch.no_grad():
        change_BT = _probability(log_probs_BT, mask_BT) - _probability(old_log_probs_BT, mask_BT)
        outside_BT = torch.where(advantages_BT > 0, change_BT > clip_high, change_BT < -clip_low)
    return _outside_has_none(log_probs_BT, old_log_probs_BT, advantages_BT, mask_BT, outside_BT, truncate)


@policy_loss("dppo_kl")
def dppo_kl(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.05,
    clip_high: float = 0.05,
    truncate: float = 20.0,
) -> PolicyLoss:
    """Divergence PPO, binary KL (arXiv:2602.04879). As dppo_tv, with the divergence

        D = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))

    and M = 0 where the token has moved on in the direction of its advantage and D > high (A > 0) or D > low (else).
    """
    with torch.no_grad():
        old_BT = keep(old_log_probs_BT, mask_BT).clamp_(_IMPOSSIBLE, 0)
        new_BT = keep(log_probs_BT, mask_BT).clamp_(_IMPOSSIBLE, 0)
        p_BT = old_BT.exp()
        rest_BT = _log_rest(old_BT) - _log_rest(new_BT)
        divergence_BT = p_BT * (old_BT - new_BT) + (1 - p_BT) * rest_BT
        outside_BT = torch.where(
            advantages_BT > 0,
            (divergence_BT > clip_high) & (new_BT > old_BT),
            (divergence_BT > clip_low) & (new_BT < old_BT),
        )
    return _outside_has_none(log_probs_BT, old_log_probs_BT, advantages_BT, mask_BT, outside_BT, truncate)


def _outside_has_none(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    outside_BT: Tensor,
    truncate: float,
) -> PolicyLoss:
    log_ratio_BT, inside_BT = clamped_log_ratio(log_probs_BT, old_log_probs_BT, as_mask(mask_BT))
    with torch.no_grad():
        ratio_BT = log_ratio_BT.exp_()
        truncated_BT = (ratio_BT > truncate) & ~outside_BT
        weight_BT = ratio_BT.clamp(max=truncate).masked_fill_(outside_BT, 0.0).mul_(keep(advantages_BT, mask_BT)).neg_()
    return PolicyLoss(weight_BT * keep(log_probs_BT, inside_BT), ratio_BT, outside_BT, truncated_BT)


def _probability(log_probs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return keep(log_probs_BT, mask_BT).exp()


def _log_rest(log_probs_BT: Tensor) -> Tensor:
    """log(1 - p), without taking 1 - p of a small p."""
    return log_probs_BT.expm1().neg_().clamp_(min=_REMAINDER).log_()
