"""What becomes of rewards before an estimator sees them.

The order of the field: `informative` groups are told by the raw score; then `overlong_penalty`, `clip_scores` and
`normalize_scores` act on the score of a sample; then `subtract_kl` on the rewards of its tokens. `keep_finished` is of the
mask alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.checks import check_number, check_shapes
from megarl.algorithms.divergence import kl
from megarl.algorithms.groups import Groups
from megarl.algorithms.masking import as_mask, keep, working
from megarl.algorithms.running import RunningStatistics


@torch.no_grad()
def overlong_penalty(length_B: Tensor, max_length: int, cache: int, factor: float = 1.0) -> Tensor:
    """(B,) float32, to be added to the score: a soft punishment in the last tokens before the limit (DAPO, arXiv:2503.14476, eq. 13).

    With L = max_length and C = cache:  0 up to L - C tokens,  (L - C - n) / C up to L,  -1 above; times `factor`.
    length_B: response tokens of each sample. ValueError unless 0 < cache <= max_length and factor >= 0.
    """
    check_shapes(length_B=length_B)
    check_number("max_length", max_length, least=1)
    check_number("cache", cache, least=1)
    if cache > max_length:
        raise ValueError(f"cache is {cache}; it must be at least 1 and at most max_length={max_length}")
    check_number("factor", factor, least=0)
    over_B = (length_B - (max_length - cache)).float()
    return -factor * (over_B / cache).clamp(0.0, 1.0)


def keep_finished(mask_BT: Tensor, truncated_B: Tensor) -> Tensor:
    """(B, T) bool: the mask without the samples that were cut at the length limit (overlong filter, arXiv:2503.14476, sec. 3.4):
    their answer is not known, so neither a reward nor a punishment is earned. Use it as the loss mask."""
    check_shapes(mask_BT=mask_BT, truncated_B=truncated_B)
    return as_mask(mask_BT) & ~as_mask(truncated_B)[:, None]


@torch.no_grad()
def clip_scores(score_B: Tensor, lower: float | None = None, upper: float | None = None) -> Tensor:
    """A copy of the scores, moved into [lower, upper]; None leaves a side open. Of any shape. A score that is NaN stays NaN,
    for the estimator to refuse. ValueError where lower is above upper."""
    check_number("lower", lower, none=True)
    check_number("upper", upper, none=True)
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(f"lower is {lower} and upper is {upper}; lower must not be above upper")
    score_B = working(score_B)
    return score_B.clone() if lower is None and upper is None else score_B.clamp(lower, upper)


@torch.no_grad()
def normalize_scores(
    score_B: Tensor,
    statistics: RunningStatistics,
    counts_B: Tensor | None = None,
    *,
    center: bool = True,
    update: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """(s - mean) / (std + eps) with the mean and std of all scores so far, these included; 0 where a sample does not count.

    statistics: with `update`, takes in this batch's scores first; without (evaluation), it stays as it is.
    counts_B: bool; samples that count (None: all). What the others hold is in nobody's statistics.
    center: subtract the mean; without, a score keeps its sign.
    As long as the stream has not varied there is no std: scores are only centred, and equal ones are exactly 0.
    ValueError on a score that counts and is not finite, or too large to square.
    """
    check_shapes(score_B=score_B, counts_B=counts_B)
    check_number("eps", eps, least=0)
    counts_B = torch.ones_like(score_B, dtype=torch.bool) if counts_B is None else as_mask(counts_B)
    score_B = keep(score_B, counts_B)
    _check_finite(score_B)
    if update:
        statistics.update(score_B[counts_B])
    # In float64 to the end: half the way, a distance to the mean may be more than float32 holds.
    result_B = torch.where(counts_B, score_B.double() - statistics.mean, 0.0) if center else score_B.double()
    if statistics.std > 0:
        result_B = result_B / (statistics.std + eps)
    return result_B.to(score_B.dtype)


class RewardLessKL(NamedTuple):
    """(B, T) each, 0 where masked."""

    reward_BT: Tensor
    kl_BT: Tensor  # before the coefficient: what a controller of the coefficient looks at


@torch.no_grad()
def subtract_kl(
    reward_BT: Tensor,
    log_probs_BT: Tensor,
    ref_log_probs_BT: Tensor,
    mask_BT: Tensor,
    coefficient: float,
    estimator: str = "k1",
) -> RewardLessKL:
    """KL in the reward: r_t - coefficient * KL_t, KL_t an estimate of KL(pi || pi_ref) at the token (arXiv:2203.02155, eq. 2; the
    estimators of `kl`). log_probs_BT: of the policy that the update starts from. ValueError on a negative coefficient, and on
    shapes that differ."""
    check_number("coefficient", coefficient, least=0)
    check_shapes(mask_BT=mask_BT, reward_BT=reward_BT)
    kl_BT = kl(log_probs_BT, ref_log_probs_BT, mask_BT, estimator)
    return RewardLessKL(keep(reward_BT, mask_BT) - coefficient * kl_BT, kl_BT)


@torch.no_grad()
def informative(score_B: Tensor, group_B: Sequence[Hashable], counts_B: Tensor | None = None) -> Tensor:
    """(B,) bool: True where the samples of a group do not all have one score (dynamic sampling, arXiv:2503.14476, eq. 11). The others
    have advantage 0 under every group-relative estimator, so that a batch is better filled up with new prompts.

    score_B: the raw score, before a penalty for length or anything else makes equal answers differ.
    counts_B: bool; samples that count (None: all). The others get their group's word and have no say in it.
    A group of one is not informative. Scores that differ by rounding alone (`Groups.levelled`) are one score, as they are for
    estimators. ValueError on a score that counts and is not finite.
    """
    check_shapes(score_B=score_B, counts_B=counts_B)
    counts_B = torch.ones_like(score_B, dtype=torch.bool) if counts_B is None else as_mask(counts_B)
    score_B = keep(score_B, counts_B)
    groups = Groups(group_B, counts_B)
    _check_finite(score_B, groups)
    score_B = groups.levelled(score_B)
    return groups.max(score_B) > groups.min(score_B)


def _check_finite(score_B: Tensor, groups: Groups | None = None) -> None:
    broken_B = ~score_B.isfinite()
    if bool(broken_B.any()):
        at = int(broken_B.nonzero()[0])
        where = "" if groups is None else f"group {groups.names[at]!r}: "
        raise ValueError(f"{where}the score of sample {at} is {float(score_B[at])}")
