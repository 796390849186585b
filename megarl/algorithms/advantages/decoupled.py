"""Several rewards, each compared within the group on its own scale."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from megarl.algorithms.advantages.base import Advantage, advantage, check_finite, check_shape, spread
from megarl.algorithms.advantages.options import (
    check_bools,
    check_choice,
    check_eps,
    check_singleton,
    check_weights,
)
from megarl.algorithms.groups import Groups, per_std
from megarl.algorithms.masking import as_mask, working
from megarl.algorithms.rows import unmasked
from megarl.algorithms.whitening import weighted_whiten


@advantage("gdpo")
@torch.no_grad()
def gdpo(
    reward_BT: Tensor,
    mask_BT: Tensor,
    group_B: Sequence[Hashable],
    reward_parts_BK: Tensor,
    *,
    weights: Sequence[float] | None = None,
    whiten: str = "sample",
    normalize_std: bool = True,
    singleton: str = "zero",
    eps: float = 1e-6,
) -> Advantage:
    """Decoupled normalisation of K rewards (arXiv:2601.05242): with r_ik reward k of sample i and its group's statistics,

        a_i = sum_k w_k (r_ik - mean_gk) / (std_gk + eps),   A_i = (a_i - mean(a)) / sqrt(var(a) + 1e-8)

    the second over the batch, counted by "sample" as in the paper, by "token" as in verl, or left out by "none".
    weights: w_k, 1 each where none are given. normalize_std False: not divided by std_gk.
    A group in which each reward is equal has A exactly 0, whatever the batch's mean. A sample alone in its group: see
    singleton; its score is sum_k w_k r_ik. reward_BT is only the measure of the batch: the rewards are reward_parts_BK.
    """
    check_choice("gdpo", "whiten", whiten, ("sample", "token", "none"))
    check_bools("gdpo", normalize_std=normalize_std)
    check_singleton("gdpo", singleton)
    eps = check_eps("gdpo", eps)
    check_shape("reward_BT", reward_BT, mask_BT)
    mask_BT = as_mask(mask_BT)
    length_B = unmasked(mask_BT)
    groups = Groups(group_B, length_B > 0)
    if reward_parts_BK.dim() != 2 or len(reward_parts_BK) != len(mask_BT):
        raise ValueError(f"reward_parts_BK is {tuple(reward_parts_BK.shape)}; it must be ({len(mask_BT)}, K)")
    parts_KB = torch.where(groups.counts_B, working(reward_parts_BK).T, 0.0)
    weight_K = check_weights("gdpo", "weights", weights, len(parts_KB))
    # In float64: rewards that cancel leave rounding noise, which the batch's normalisation would make 10,000 times larger.
    advantage_B, score_B = (torch.zeros_like(length_B, dtype=torch.float64) for _ in range(2))
    equal_B = torch.ones_like(groups.counts_B)
    for k, (weight, part_B) in enumerate(zip(weight_K, parts_KB, strict=True)):
        check_finite(f"reward {k}", part_B, groups)
        part_B = groups.levelled(part_B)
        centred_B = groups.centred(part_B)
        score_B = score_B + weight * part_B.double()
        equal_B &= groups.equal(part_B)
        advantage_B = advantage_B + weight * (
            per_std(centred_B, groups.std_of_centred(centred_B), eps) if normalize_std else centred_B
        )
    advantage_B = groups.where_alone(singleton, score_B, advantage_B)
    if whiten != "none":
        weight_B = length_B if whiten == "token" else groups.counts_B
        whitened_B = weighted_whiten(advantage_B, weight_B, precision=parts_KB.dtype)
        keep_B = groups.alone_B & (singleton == "score") | ~equal_B
        advantage_B = torch.where(keep_B, whitened_B, 0.0)
    return spread(advantage_B, mask_BT, parts_KB.dtype)
