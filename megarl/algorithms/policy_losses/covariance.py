"""Clip-Cov and KL-Cov: the few tokens that would lower the entropy most are held back (arXiv:2505.22617).

The covariance of a token is its part in Cov(log pi, A) over the mini-batch, c = (log pi - mean)(A - mean): a likely token
with a high advantage makes the policy surer of itself. Tokens are selected over the whole mini-batch, once, from the
log-probs before the update; so the selection depends neither on how the mini-batch is cut, nor on order or padding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.bits import BitMask, keep, zero_where_
from megarl.algorithms.masking import as_mask
from megarl.algorithms.policy_losses.base import PolicyLoss, clamped_log_ratio, policy_loss, with_slope
from megarl.algorithms.policy_losses.vanilla import clipped_parts


def select_at_random(
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    cov_ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> dict[str, Tensor]:
    """selected_BT: max(1, cov_ratio N) of the tokens with cov_low < c < cov_high, N tokens in all.

    The paper draws them at random. Here the draw is by a hash of the tokens' own values: as good as random,
    and the same in every order. ValueError on a cov_ratio that is not above 0 and at most 1.
    """
    mask_BT, count = as_mask(mask_BT), _count(mask_BT, cov_ratio)
    covariance_BT = _covariance(old_log_probs_BT, advantages_BT, mask_BT)
    candidates_BT = mask_BT & (covariance_BT > cov_low) & (covariance_BT < cov_high)
    hash_BT = _hash(old_log_probs_BT, advantages_BT, mask_BT)
    return {"selected_BT": _smallest(hash_BT, candidates_BT, count)}


def select_largest(
    old_log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, cov_ratio: float = 2e-4
) -> dict[str, Tensor]:
    """selected_BT: the max(1, cov_ratio N) tokens of the largest c ; among equals the hash decides."""
    mask_BT, count = as_mask(mask_BT), _count(mask_BT, cov_ratio)
    covariance_BT = _covariance(old_log_probs_BT, advantages_BT, mask_BT)
    covariances_N = covariance_BT[mask_BT]
    if not count:
        return {"selected_BT": torch.zeros_like(mask_BT)}
    least = covariances_N.topk(count).values[-1]
    above_BT = mask_BT & (covariance_BT > least)
    hash_BT = _hash(old_log_probs_BT, advantages_BT, mask_BT)
    equal_BT = _smallest(hash_BT, mask_BT & (covariance_BT == least), count - int(above_BT.sum()))
    return {"selected_BT": above_BT | equal_BT}


@policy_loss("clip_cov", masked=True, prepare=select_at_random, makes=("selected_BT",))
def clip_cov(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    selected_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PolicyLoss:
    """Clip-Cov (arXiv:2505.22617, sec. 4.2): PPO's clipped loss; selected tokens have none, and no gradient."""
    parts = clipped_parts(log_probs_BT, old_log_probs_BT, advantages_BT, mask_BT, clip_low, clip_high, None)
    selected_BT = as_mask(selected_BT)
    value_BT, slope_BT = zero_where_(parts.value_BT, selected_BT), zero_where_(parts.slope_BT, selected_BT)
    clipped_BT = parts.clipped_BT | selected_BT
    loss_BT = with_slope(log_probs_BT, value_BT, slope_BT)
    return PolicyLoss(loss_BT, parts.ratio_BT, clipped_BT, log_ratio_BT=parts.log_ratio_BT)


@policy_loss("kl_cov", masked=True, prepare=select_largest, makes=("selected_BT",))
def kl_cov(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    selected_BT: Tensor,
    *,
    kl_weight: float = 1.0,
) -> PolicyLoss:
    """KL-Cov (arXiv:2505.22617, sec. 4.2): L = -A r, and of selected tokens -A r + kl_weight |log r|. Nothing is clipped."""
    with torch.no_grad():
        mask = BitMask(mask_BT)
        log_ratio_BT, inside_BT = clamped_log_ratio(log_probs_BT, old_log_probs_BT, mask)
        ratio_BT = log_ratio_BT.exp()
        value_BT = mask(advantages_BT).mul_(ratio_BT).neg_()
        weight_BT = keep(torch.full_like(ratio_BT, kl_weight), as_mask(selected_BT))
        slope_BT = torch.addcmul(value_BT, weight_BT, log_ratio_BT.sign()).mul_(inside_BT)
        value_BT = value_BT.addcmul_(weight_BT, log_ratio_BT.abs())
    return PolicyLoss(with_slope(log_probs_BT, value_BT, slope_BT), ratio_BT, log_ratio_BT=log_ratio_BT)


def _count(mask_BT: Tensor, ratio: float) -> int:
    if not 0 < ratio <= 1:
        raise ValueError(f"cov_ratio is {ratio}; it must be above 0 and at most 1")
    tokens = int(mask_BT.sum())
    return min(tokens, max(1, int(ratio * tokens)))


def _covariance(log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """float64. The means are rounded to float32: what the order of a sum does to their last bits must not decide."""

    def centred(values_BT: Tensor) -> Tensor:
        kept_BT = keep(values_BT, mask_BT).double().clamp(-1e6, 1e6)
        return kept_BT - (kept_BT.sum() / mask_BT.sum().clamp(min=1)).float()

    return centred(log_probs_BT) * centred(advantages_BT)


def _hash(log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """int64 of each token: of its values, its position and the whole of its sequence, not of where that lies in the batch."""

    def bits(values_BT: Tensor) -> Tensor:
        return keep(values_BT, mask_BT).float().view(torch.int32).long()

    position_T = torch.arange(1, mask_BT.shape[1] + 1, device=mask_BT.device)
    token_BT = _mix(bits(log_probs_BT) + _mix(bits(advantages_BT) + _mix(position_T)))
    token_BT = token_BT * mask_BT
    return _mix(token_BT + token_BT.sum(-1, keepdim=True))


def _mix(x: Tensor) -> Tensor:
    """Every bit in changes about half of the bits out: two rounds of multiply and shift, in wrapping int64."""
    for factor in (-49064778989728563, -4265267296055464877):
        x = x * factor
        x = x ^ ((x >> 32) & 0xFFFFFFFF)
    return x


def _smallest(hash_BT: Tensor, among_BT: Tensor, count: int) -> Tensor:
    """The `count` of `among` with the smallest hash. Tokens equal in everything, sequence included, go together."""
    hashes_N = hash_BT[among_BT]
    count = min(count, len(hashes_N))
    if not count:
        return torch.zeros_like(among_BT)
    return among_BT & (hash_BT <= hashes_N.kthvalue(count).values)
