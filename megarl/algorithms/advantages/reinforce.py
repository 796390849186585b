"""REINFORCE with baselines that are not a critic's: the batch's mean, the group's, the greedy answer's."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from megarl.algorithms.advantages.base import (
    Advantage,
    advantage,
    check_finite,
    check_shape,
    grouped,
    scores,
    spread,
)
from megarl.algorithms.advantages.options import check_bools, check_fraction, check_singleton
from megarl.algorithms.masking import as_mask
from megarl.algorithms.rows import any_unmasked, fill_masked, unmasked
from megarl.algorithms.scan import decaying_sum, over_tokens
from megarl.algorithms.whitening import masked_whiten, weighted_whiten


@advantage("reinforce_plus_plus")
@torch.no_grad()
def reinforce_plus_plus(reward_BT: Tensor, mask_BT: Tensor, *, gamma: float = 1.0, whiten: bool = True) -> Advantage:
    """Discounted returns, whitened over the batch's tokens (arXiv:2501.03262):

        G_t = r_t + gamma G_n, n the next unmasked token;   A_t = (G_t - mean(G)) / sqrt(var(G) + 1e-8)

    The return carries over observation tokens in the middle of a response undiscounted. whiten False: A_t = G_t.
    """
    gamma = check_fraction("reinforce_plus_plus", "gamma", gamma)
    check_bools("reinforce_plus_plus", whiten=whiten)
    returns_BT = _returns(reward_BT, as_mask(mask_BT), gamma)
    return Advantage(masked_whiten(returns_BT, mask_BT) if whiten else returns_BT.clone(), returns_BT)


@advantage("reinforce_plus_plus_baseline")
@torch.no_grad()
def reinforce_plus_plus_baseline(
    reward_BT: Tensor,
    mask_BT: Tensor,
    group_B: Sequence[Hashable],
    *,
    singleton: str = "zero",
    whiten: bool = True,
) -> Advantage:
    """a_i = s_i - mean_g, then whitened over the batch's tokens: A_i = (a_i - mean(a)) / sqrt(var(a) + 1e-8), each sample
    counted once a token (arXiv:2501.03262).

    A group of equal scores has A exactly 0, not the batch's -mean / std. singleton "score": a_i of a sample alone in its group
    is s_i, whitened like all others; "zero": A_i is 0.
    """
    check_bools("reinforce_plus_plus_baseline", whiten=whiten)
    check_singleton("reinforce_plus_plus_baseline", singleton)
    mask_BT, score_B, groups = grouped(reward_BT, mask_BT, group_B)
    advantage_B = groups.where_alone(singleton, score_B, groups.centred(score_B))
    if whiten:
        whitened_B = weighted_whiten(advantage_B, unmasked(mask_BT), precision=score_B.dtype)
        keep_B = groups.alone_B & (singleton == "score") | ~groups.equal(score_B)
        advantage_B = torch.where(keep_B, whitened_B, 0.0)
    return spread(advantage_B, mask_BT, score_B.dtype)


@advantage("remax")
@torch.no_grad()
def remax(reward_BT: Tensor, mask_BT: Tensor, baseline_B: Tensor) -> Advantage:
    """A_t = sum_{s >= t} r_s - b_i, b_i the score of the greedy answer to the same prompt (arXiv:2310.10505).

    Both are masked: a sample with no unmasked token needs no baseline. returns_BT is the sum without the baseline.
    """
    mask_BT = as_mask(mask_BT)
    returns_BT = _returns(reward_BT, mask_BT, 1.0)
    if baseline_B.shape != mask_BT.shape[:1]:
        raise ValueError(f"baseline_B is {tuple(baseline_B.shape)}; it must be ({len(mask_BT)},)")
    baseline_B = torch.where(any_unmasked(mask_BT), baseline_B.to(returns_BT.dtype), 0.0)
    check_finite("baseline_B", baseline_B)

    def less_baseline(rows: slice, width: int) -> Tensor:
        return returns_BT[rows, :width] - baseline_B[rows, None]

    return Advantage(fill_masked(torch.empty_like(returns_BT), mask_BT, less_baseline), returns_BT)


def _returns(reward_BT: Tensor, mask_BT: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_n, n the next unmasked token. ValueError on a score or a return that is not finite."""
    check_shape("reward_BT", reward_BT, mask_BT)
    finite: list[Tensor] = []

    def formula(reward: Tensor) -> tuple[Tensor]:
        returns = decaying_sum(reward, gamma)
        finite.extend(end.isfinite() for end in (returns.aminmax() if returns.numel() else ()))
        return (returns,)

    (returns_BT,) = over_tokens(formula, (reward_BT,), mask_BT)
    if not all(map(bool, finite)):
        check_finite("score", scores(reward_BT, mask_BT))
        check_finite("return", returns_BT.abs().amax(-1))
    return returns_BT
