"""Clip-Cov and KL-Cov: the few tokens that would lower the entropy most are held back (arXiv:2505.22617).

The covariance of a token is its part in Cov(log pi, A) over the mini-batch, c = (log pi - mean)(A - mean): a likely token
with a high advantage makes the policy surer of itself. Tokens are selected over the whole mini-batch, once, from the
log-probs before the update; so the selection depends neither on how the mini-batch is cut, nor on order or padding.
What cannot be told apart, the same token at the same place of the same sequence, is selected together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.bits import keep, zero_where_
from megarl.algorithms.checks import check_number, check_shapes
from megarl.algorithms.masking import as_mask
from megarl.algorithms.policy_losses.base import PolicyLoss, clamped_log_ratio, mask_of, policy_loss, with_slope
from megarl.algorithms.policy_losses.vanilla import clipped_parts

_HUGE = 1e6  # what is not finite must not make the means so


def check_bounds(cov_ratio: float, cov_low: float, cov_high: float) -> None:
    check_number("cov_ratio", cov_ratio, above=0, most=1)
    check_number("cov_low", cov_low)
    check_number("cov_high", cov_high)
    if not cov_low < cov_high:
        raise ValueError(f"cov_low is {cov_low} and cov_high is {cov_high}; cov_low must be below cov_high")


def check_weight(cov_ratio: float, kl_weight: float) -> None:
    check_number("cov_ratio", cov_ratio, above=0, most=1)
    check_number("kl_weight", kl_weight, least=0)


@torch.no_grad()
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
    and the same in every order. ValueError on a cov_ratio that is not above 0 and at most 1, and on bounds that leave nothing.
    """
    check_bounds(cov_ratio, cov_low, cov_high)
    tokens = _Tokens(old_log_probs_BT, advantages_BT, mask_BT)
    within_BT = (tokens.covariance_BT > cov_low) & (tokens.covariance_BT < cov_high) & tokens.mask.bool_BT
    at_N = tokens.smallest_hash(within_BT.flatten().nonzero()[:, 0], tokens.share(cov_ratio))
    return {"selected_BT": tokens.marked(at_N)}


@torch.no_grad()
def select_largest(
    old_log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor, *, cov_ratio: float = 2e-4
) -> dict[str, Tensor]:
    """selected_BT: the max(1, cov_ratio N) tokens of the largest c; among equals the hash decides. ValueError on a cov_ratio that is
    not above 0 and at most 1."""
    check_number("cov_ratio", cov_ratio, above=0, most=1)
    tokens = _Tokens(old_log_probs_BT, advantages_BT, mask_BT)
    count = tokens.share(cov_ratio)
    if not count:
        return {"selected_BT": torch.zeros_like(tokens.mask.bool_BT)}
    # Masked places must not be among the largest: they come after everything that is there.
    covariance_BT = torch.where(tokens.mask.bool_BT, tokens.covariance_BT, -torch.inf)
    at_N = _candidates(covariance_BT, count)
    covariance_N = covariance_BT.flatten()[at_N]
    least = covariance_N.topk(count).values[-1]
    above_N, equal_N = at_N[covariance_N > least], at_N[covariance_N == least]
    equal_N = tokens.smallest_hash(equal_N, count - len(above_N))
    return {"selected_BT": tokens.marked(torch.cat([above_N, equal_N]))}


@policy_loss("clip_cov", masked=True, prepare=select_at_random, makes=("selected_BT",), check=check_bounds)
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
    check_shapes(mask_BT=mask_BT, selected_BT=selected_BT)
    parts = clipped_parts(log_probs_BT, old_log_probs_BT, advantages_BT, mask_BT, clip_low, clip_high, None)
    selected_BT = as_mask(selected_BT)
    value_BT, slope_BT = zero_where_(parts.value_BT, selected_BT), zero_where_(parts.slope_BT, selected_BT)
    clipped_BT = parts.clipped_BT | selected_BT
    loss_BT = with_slope(log_probs_BT, value_BT, slope_BT)
    return PolicyLoss(loss_BT, parts.ratio_BT, clipped_BT, log_ratio_BT=parts.log_ratio_BT)


@policy_loss("kl_cov", masked=True, prepare=select_largest, makes=("selected_BT",), check=check_weight)
def kl_cov(
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    selected_BT: Tensor,
    *,
    kl_weight: float = 1.0,
) -> PolicyLoss:
    """KL-Cov (arXiv:2505.22617, sec. 4.2): L = -A r, and of selected tokens -A r + kl_weight |log r|. Nothing is clipped.

    ValueError on a negative kl_weight.
    """
    check_number("kl_weight", kl_weight, least=0)
    with torch.no_grad():
        mask = mask_of(
            mask_BT,
            log_probs_BT=log_probs_BT,
            old_log_probs_BT=old_log_probs_BT,
            advantages_BT=advantages_BT,
            selected_BT=selected_BT,
        )
        log_ratio_BT, inside_BT = clamped_log_ratio(log_probs_BT, old_log_probs_BT, mask)
        ratio_BT = log_ratio_BT.exp()
        value_BT = mask(advantages_BT).mul_(ratio_BT).neg_()
        weight_BT = keep(torch.full_like(ratio_BT, kl_weight), as_mask(selected_BT))
        slope_BT = torch.addcmul(value_BT, weight_BT, log_ratio_BT.sign()).mul_(inside_BT)
        value_BT = value_BT.addcmul_(weight_BT, log_ratio_BT.abs())
    return PolicyLoss(with_slope(log_probs_BT, value_BT, slope_BT), ratio_BT, log_ratio_BT=log_ratio_BT)


def _candidates(values_BT: Tensor, count: int) -> Tensor:
    """Flat places that hold the `count` largest values, and not many more: with as many rows whose maximum reaches a
    bound, at least `count` values reach it. Far cheaper than the largest of everything."""
    if count > len(values_BT):
        return torch.arange(values_BT.numel(), device=values_BT.device)
    bound = values_BT.amax(-1).topk(count).values[-1]
    return (values_BT >= bound).flatten().nonzero()[:, 0]


class _Tokens:
    """The tokens of a mini-batch: their covariances, and a hash of each that knows nothing of where its sequence lies."""

    def __init__(self, log_probs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor):
        self.mask = mask_of(mask_BT, old_log_probs_BT=log_probs_BT, advantages_BT=advantages_BT)
        self._log_probs_BT = self.mask(log_probs_BT).nan_to_num_().clamp_(-_HUGE, _HUGE)
        self._advantages_BT = self.mask(advantages_BT).nan_to_num_().clamp_(-_HUGE, _HUGE)
        self.count = int(self.mask.bool_BT.count_nonzero())
        self.covariance_BT = self._centred(self._log_probs_BT).mul_(self._centred(self._advantages_BT))

    def share(self, ratio: float) -> int:
        """max(1, ratio N), of N tokens."""
        return min(self.count, max(1, int(ratio * self.count)))

    def smallest_hash(self, at_N: Tensor, count: int) -> Tensor:
        """Of tokens (flat places), the `count` with the smallest hash. Those equal in everything, sequence included, go
        together."""
        if count >= len(at_N):
            return at_N
        hash_N = self._hash(at_N)
        return at_N[hash_N <= hash_N.kthvalue(count).values] if count > 0 else at_N[:0]

    def marked(self, at_N: Tensor) -> Tensor:
        """(B, T) bool: True at these places."""
        marked_BT = torch.zeros_like(self.mask.bool_BT)
        marked_BT.view(-1)[at_N] = True
        return marked_BT

    def _centred(self, values_BT: Tensor) -> Tensor:
        # The mean is rounded to float32: what the order of a sum does to its last bits must not decide.
        return values_BT - (values_BT.sum(dtype=torch.float64) / max(self.count, 1)).float()

    def _hash(self, at_N: Tensor) -> Tensor:
        """int64: of the token's values, how many unmasked tokens come before it, and all log-probs of the sequence."""
        width = self.mask.bool_BT.shape[1]
        bits_BT = self._log_probs_BT.float().view(torch.int32)
        advantages_P = self._advantages_BT.float().view(torch.int32).flatten()
        row_N = at_N // width
        # Not its column: that would change with padding on the left, and with masked tokens between.
        position_N = self.mask.bool_BT.view(torch.uint8).cumsum(-1, dtype=torch.int32).flatten()[at_N].long() - 1
        return _mix(
            bits_BT.flatten()[at_N] + _mix(advantages_P[at_N] + _mix(position_N + _mix(bits_BT.sum(-1)[row_N])))
        )


def _mix(x: Tensor) -> Tensor:
    """Every bit in changes about half of the bits out: two rounds of multiply and shift, in wrapping int64."""
    for factor in (-49064778989728563, -4265267296055464877):
        x = x * factor
        x = x ^ ((x >> 32) & 0xFFFFFFFF)
    return x
