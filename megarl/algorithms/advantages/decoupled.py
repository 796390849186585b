"""Several rewards, each compared within the group on its own scale."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from megarl.algorithms.advantages.base import Advantage, advantage, check_choice, check_finite, check_shape, spread
from megarl.algorithms.groups import Groups
from megarl.algorithms.masking import as_mask, working
from megarl.algorithms.rows import unmasked
from megarl.algorithms.whitening import weighted_whiten


@advantage("gdpo")
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
    check_choice("whiten", whiten, ("sample", "token", "none"))
    check_shape("reward_BT", reward_BT, mask_BT)
    mask_BT = as_mask(mask_BT)
    length_B = unmasked(mask_BT)
    groups = Groups(group_B, length_B > 0)
    if reward_parts_BK.dim() != 2 or len(reward_parts_BK) != len(mask_BT):
        raise ValueError(f"reward_parts_BK is {tuple(reward_parts_BK.shape)}; it must be ({len(mask_BT)}, K)")
    # In float64: rewards that cancel leave rounding noise, which the batch's normalisation would make 10,000 times larger.
    parts_KB = torch.where(groups.counts_B, reward_parts_BK.double().T, 0.0)
    weight_K = [1.0] * len(parts_KB) if weights is None else list(weights)
    if len(weight_K) != len(parts_KB):
        raise ValueError(f"weights has {len(weight_K)} numbers, there are {len(parts_KB)} rewards a sample")
    advantage_B, score_B = (torch.zeros_like(length_B, dtype=torch.float64) for _ in range(2))
    equal_B = torch.ones_like(groups.counts_B)
    for k, (weight, part_B) in enumerate(zip(weight_K, parts_KB, strict=True)):
        check_finite(f"reward {k}", part_B, groups)
        centred_B = groups.centred(part_B)
        score_B = score_B + weight * part_B
        equal_B &= groups.equal(part_B)
        advantage_B = advantage_B + weight * (
            centred_B / (groups.std_of_centred(centred_B) + eps) if normalize_std else centred_B
        )
    advantage_B = groups.where_alone(singleton, score_B, advantage_B)
    if whiten != "none":
        whitened_B = weighted_whiten(advantage_B, length_B if whiten == "token" else groups.counts_B.float())
        keep_B = groups.alone_B & (singleton == "score") | ~equal_B
        advantage_B = torch.where(keep_B, whitened_B, 0.0)
    return spread(advantage_B.to(working(reward_parts_BK).dtype), mask_BT)
