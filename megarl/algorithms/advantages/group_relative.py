"""The score of a sample against the scores of its group: one advantage a sample, written to all of its tokens.

s_i is a sample's score, n the size of its group g, mean_g and std_g (with n - 1) over the group's scores. Everywhere:
samples with no unmasked token are in no group; a group of equal scores has advantage exactly 0; a sample alone in its group
has nothing to be compared with: 0, or by singleton="score" its raw score (verl gives the score). Scores that differ by rounding
alone are equal, see `Groups.levelled`. Statistics are in float64, the result in the precision of the rewards.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from megarl.algorithms.advantages.base import Advantage, advantage, grouped, spread
from megarl.algorithms.advantages.options import (
    check_bools,
    check_choice,
    check_eps,
    check_positive,
    check_singleton,
)
from megarl.algorithms.groups import Groups, per_std
from megarl.algorithms.rows import unmasked

LEVELS = ("batch", "group", "none")


@advantage("grpo")
@torch.no_grad()
def grpo(
    reward_BT: Tensor,
    mask_BT: Tensor,
    group_B: Sequence[Hashable],
    *,
    normalize_std: bool = True,
    singleton: str = "zero",
    eps: float = 1e-6,
) -> Advantage:
    """Score against its group: A_i = (s_i - mean_g) / (std_g + eps), the std with n - 1 (arXiv:2402.03300, sec. 4.1.2).

    normalize_std False: A_i = s_i - mean_g, Dr.GRPO (arXiv:2503.20783, sec. 3).
    singleton: what a sample alone in its group gets, "zero" or its "score". ValueError on a score that is not finite.
    """
    eps = check_eps("grpo", eps)
    check_bools("grpo", normalize_std=normalize_std)
    check_singleton("grpo", singleton)
    mask_BT, score_B, groups = grouped(reward_BT, mask_BT, group_B)
    advantage_B = groups.centred(score_B)
    if normalize_std:
        advantage_B = per_std(advantage_B, groups.std_of_centred(advantage_B), eps)
    return spread(groups.where_alone(singleton, score_B, advantage_B), mask_BT, score_B.dtype)


@advantage("rloo")
@torch.no_grad()
def rloo(reward_BT: Tensor, mask_BT: Tensor, group_B: Sequence[Hashable], *, singleton: str = "zero") -> Advantage:
    """Leave-one-out baseline: A_i = s_i - mean of the other scores in the group (arXiv:2402.14740, sec. 2).

    Computed as n / (n - 1) (s_i - mean_g), which is the same.
    """
    check_singleton("rloo", singleton)
    mask_BT, score_B, groups = grouped(reward_BT, mask_BT, group_B)
    return spread(groups.where_alone(singleton, score_B, _leave_one_out(groups, score_B)), mask_BT, score_B.dtype)


@advantage("opo")
@torch.no_grad()
def opo(reward_BT: Tensor, mask_BT: Tensor, group_B: Sequence[Hashable], *, singleton: str = "zero") -> Advantage:
    """Baseline weighted by length: A_i = s_i - sum_j l_j s_j / sum_j l_j over the group, l_j the unmasked tokens of j
    (arXiv:2505.23585: the baseline of least variance where a gradient's norm grows with the length)."""
    check_singleton("opo", singleton)
    mask_BT, score_B, groups = grouped(reward_BT, mask_BT, group_B)
    advantage_B = groups.centred(score_B, weight_B=unmasked(mask_BT).double())
    return spread(groups.where_alone(singleton, score_B, advantage_B), mask_BT, score_B.dtype)


@advantage("gpg")
@torch.no_grad()
def gpg(
    reward_BT: Tensor,
    mask_BT: Tensor,
    group_B: Sequence[Hashable],
    *,
    singleton: str = "zero",
    scale: str = "scores",
    f_norm: float = 1.0,
) -> Advantage:
    """A_i = alpha (s_i - mean_g) / f_norm, alpha making up for samples that carry no gradient (arXiv:2504.02546).

    scale "scores" (as verl): alpha = samples / samples whose score is not 0; "groups" (as the paper): alpha =
    samples / samples in groups whose scores differ. The divisor is at least 1. A sample alone in its group that keeps its score
    is scaled like all others.
    """
    check_choice("gpg", "scale", scale, ("scores", "groups"))
    f_norm = check_positive("gpg", "f_norm", f_norm)
    check_singleton("gpg", singleton)
    mask_BT, score_B, groups = grouped(reward_BT, mask_BT, group_B)
    carries_B = score_B != 0 if scale == "scores" else ~groups.equal(score_B)
    alpha = groups.counts_B.sum().double() / (carries_B & groups.counts_B).sum().clamp(min=1)
    advantage_B = groups.where_alone(singleton, score_B, groups.centred(score_B))
    return spread(alpha * advantage_B / f_norm, mask_BT, score_B.dtype)


@advantage("group_norm")
@torch.no_grad()
def group_norm(
    reward_BT: Tensor,
    mask_BT: Tensor,
    group_B: Sequence[Hashable],
    *,
    mean_level: str = "group",
    std_level: str = "batch",
    leave_one_out: bool = False,
    singleton: str = "zero",
    eps: float = 1e-6,
) -> Advantage:
    """A_i = (s_i - mean) / (std + eps), mean and std (with n - 1) each of the "group", the "batch", or "none": 0 and 1.

    Group and batch: LitePPO (arXiv:2508.08221); group and group: GRPO; group and none: Dr.GRPO; group and none with
    leave_one_out: RLOO; batch and batch: REINFORCE with a normalised score. The std of the batch is that of its scores.
    leave_one_out: the mean is of the others at its level, A_i = n / (n - 1) (s_i - mean) / (std + eps).
    A std of exactly 0 says that nothing differs: the advantage is 0. A sample alone at a level: see singleton. A group of equal
    scores has advantage 0 where mean or std is its own; a mean of the batch leaves it its distance from that.
    """
    check_choice("group_norm", "mean_level", mean_level, LEVELS)
    check_choice("group_norm", "std_level", std_level, LEVELS)
    check_bools("group_norm", leave_one_out=leave_one_out)
    check_singleton("group_norm", singleton)
    eps = check_eps("group_norm", eps)
    mask_BT, score_B, groups = grouped(reward_BT, mask_BT, group_B)
    levels = {"group": groups, "batch": Groups.all_in_one(groups.counts_B)}
    advantage_B = score_B
    if mean_level != "none":
        level = levels[mean_level]
        centred = _leave_one_out if leave_one_out else Groups.centred
        advantage_B = centred(level, level.levelled(score_B))
    if std_level != "none":
        level = levels[std_level]
        std_B = level.std_of_centred(level.centred(level.levelled(score_B)))
        advantage_B = per_std(advantage_B, std_B, eps)
    for name in {mean_level, std_level} - {"none"}:
        advantage_B = levels[name].where_alone(singleton, score_B, advantage_B)
    return spread(advantage_B, mask_BT, score_B.dtype)


def _leave_one_out(groups: Groups, score_B: Tensor) -> Tensor:
    return groups.centred(score_B) * (groups.size_B / (groups.size_B - 1).clamp(min=1))
