"""The score of a sample against the scores of its group: one advantage a sample."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from megarl.algorithms.advantages.base import Advantage, advantage, grouped, spread


@advantage("grpo")
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
    mask_BT, score_B, groups = grouped(reward_BT, mask_BT, group_B)
    advantage_B = groups.centred(score_B)
    if normalize_std:
        advantage_B = advantage_B / (groups.std_of_centred(advantage_B) + eps)
    return spread(groups.where_alone(singleton, score_B, advantage_B), mask_BT)
