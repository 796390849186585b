"""Advantages for pass@k: a group is as good as the best of k of its answers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from megarl.algorithms.advantages.base import Advantage, advantage, grouped, spread
from megarl.algorithms.advantages.options import check_bools, check_count, check_eps, check_singleton
from megarl.algorithms.groups import Groups, per_std


@advantage("grpo_passk")
@torch.no_grad()
def grpo_passk(
    reward_BT: Tensor,
    mask_BT: Tensor,
    group_B: Sequence[Hashable],
    *,
    k: int | None = None,
    normalize_std: bool = True,
    singleton: str = "zero",
    eps: float = 1e-6,
) -> Advantage:
    """k None: the whole group is one try of k = n. Its score is the maximum, the baseline of i the maximum of the others:
    the one best sample gets (s_max - s_second) / (std_g + eps), all others 0 (arXiv:2503.19595). This is the default: it needs no
    k, and it is what the name means elsewhere.

    k a number: every subset of k samples is a try, in closed form (arXiv:2508.10751, there for scores of 0 and 1, here
    for any). With S drawn from all subsets of size k:
        A_i = (E[max S | i in S] - E[max S]) / (std[max S] + eps)
    For 0 and 1, with N- samples of 0: E[max S] = 1 - C(N-, k) / C(n, k). k = 1 is GRPO (its std with n).

    normalize_std False: not divided. ValueError where a group of more than one sample has fewer than k; where it has them,
    but too few with an unmasked token, 0.
    """
    k = check_count("grpo_passk", "k", k)
    eps = check_eps("grpo_passk", eps)
    check_bools("grpo_passk", normalize_std=normalize_std)
    check_singleton("grpo_passk", singleton)
    mask_BT, score_B, groups = grouped(reward_BT, mask_BT, group_B)
    highest_B = groups.max(score_B)  # what differs from it by rounding alone is as good: every try may be the best
    as_good_B = highest_B.double() - score_B <= groups.rounding(score_B)
    level_B = torch.where(as_good_B, highest_B, score_B)
    advantage_B, std_B = _best_of_all(level_B, groups) if k is None else _best_of_k(level_B, groups, k)
    if normalize_std:
        advantage_B = per_std(advantage_B, std_B, eps)
    return spread(groups.where_alone(singleton, score_B, advantage_B), mask_BT, score_B.dtype)


def _best_of_all(score_B: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """s_max - s_second for the one that is best, and the standard deviation of the group's scores."""
    best_B = score_B == groups.max(score_B)
    others_B = torch.where(best_B, groups.min(score_B), score_B)
    wins_B = best_B & (groups.sum(best_B) == 1)
    lead_B = torch.where(wins_B, score_B.double() - groups.max(others_B), 0.0)
    return lead_B, groups.std_of_centred(groups.centred(score_B))


def _best_of_k(score_B: Tensor, groups: Groups, k: int) -> tuple[Tensor, Tensor]:
    """E[max S | i in S] - E[max S] and std[max S] over all subsets S of size k.

    The sample of rank r (0 the lowest) is the maximum of C(r, k - 1) of all C(n, k) subsets, and of C(r - 1, k - 2) of the
    C(n - 1, k - 1) that hold a given lower one. Distances below the best, so that what is always the maximum is exactly 0.
    """
    short_B = (groups.named_B < k) & (groups.named_B > 1)
    if bool(short_B.any()):
        at = int(short_B.nonzero()[0])
        raise ValueError(
            f"group {groups.names[at]!r} has {int(groups.named_B[at])} samples; pass@{k} needs at least {k}"
        )
    rank_B, order_B = groups.rank(score_B)
    below_B, n_B = groups.max(score_B).double() - score_B, groups.size_B
    of_all_B = _choose(rank_B, k - 1, n_B, k)
    if_it_is_best_B = _choose(rank_B, k - 1, n_B - 1, k - 1)
    if_other_is_B = _choose(rank_B - 1, k - 2, n_B - 1, k - 1)
    mean_B = groups.sum(of_all_B * below_B)
    with_it_B = if_it_is_best_B * below_B + groups.sum_above(if_other_is_B * below_B, order_B)
    deviation_B = below_B - mean_B
    largest_B = groups.max(deviation_B.abs()).clamp(min=1)  # its square must not overflow
    std_B = largest_B * groups.sum(of_all_B * (deviation_B / largest_B).square()).sqrt()
    return torch.where(n_B >= k, mean_B - with_it_B, 0.0), std_B


def _choose(n_B: Tensor, k: int, of_n_B: Tensor, of_k: int) -> Tensor:
    """C(n, k) / C(of_n, of_k) in float64, by logarithms; exactly 0 where either is 0."""
    counts_B = (n_B >= k) & (of_n_B >= of_k) if k >= 0 else torch.zeros_like(n_B, dtype=torch.bool)
    return torch.where(counts_B, (_log_choose(n_B, max(k, 0)) - _log_choose(of_n_B, of_k)).exp(), 0.0)


def _log_choose(n_B: Tensor, k: int) -> Tensor:
    n_B = n_B.double().clamp(min=k)
    return (n_B + 1).lgamma() - (n_B - k + 1).lgamma() - torch.full_like(n_B, k + 1).lgamma()
