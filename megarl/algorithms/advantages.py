"""Advantages from rewards. Each estimator is its formula; its source is in its docstring.

All take rewards and a mask of shape (B, T) and give an `Advantage` of that shape, 0 where masked. A sample's score s_i
is the sum of its rewards over unmasked tokens; a sample with none has no score and is in nobody's statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.groups import Groups
from megarl.algorithms.masking import as_mask, keep
from megarl.algorithms.registry import Registry


class Advantage(NamedTuple):
    """float32, 0 where masked."""

    advantages_BT: Tensor
    returns_BT: Tensor  # what a critic would learn; the advantages themselves where an estimator has no critic


AdvantageFunction = Callable[..., Advantage]

advantage: Registry[AdvantageFunction] = Registry(
    "advantage estimator",
    inputs=("reward_BT", "mask_BT", "group_B"),
    settings=("normalize_std", "singleton"),
)


def get_advantage(name: str) -> AdvantageFunction:
    """The estimator of this name, or the user's at "package.module.function". ValueError where there is none, or where
    it asks for what the trainer does not have."""
    return advantage.get(name)


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
    mask_BT = as_mask(mask_BT)
    score_B = scores(reward_BT, mask_BT)
    groups = Groups(group_B, mask_BT.any(-1))
    _check_finite(score_B, groups)
    advantage_B = groups.centred(score_B)
    if normalize_std:
        advantage_B = advantage_B / (groups.std_of_centred(advantage_B) + eps)
    return spread(where_alone(groups, singleton, score_B, advantage_B), mask_BT)


def scores(reward_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B,) the sum of each sample's rewards over unmasked tokens, float32."""
    if reward_BT.dim() != 2 or reward_BT.shape != mask_BT.shape:
        raise ValueError(f"reward_BT {tuple(reward_BT.shape)} and mask_BT {tuple(mask_BT.shape)} must be one (B, T)")
    return keep(reward_BT, mask_BT).sum(-1).float()


def where_alone(groups: Groups, singleton: str, score_B: Tensor, advantage_B: Tensor) -> Tensor:
    """The advantage; where a sample is alone in its group, 0 (singleton "zero") or its raw score ("score")."""
    if singleton not in ("zero", "score"):
        raise ValueError(f"singleton is {singleton!r}; it may be 'zero' or 'score'")
    lone_B = score_B if singleton == "score" else torch.zeros_like(score_B)
    return torch.where(groups.alone_B, lone_B, advantage_B)


def spread(advantage_B: Tensor, mask_BT: Tensor) -> Advantage:
    """One advantage a sample, written to each of its unmasked tokens."""
    advantages_BT = torch.where(as_mask(mask_BT), advantage_B[:, None], 0.0)
    return Advantage(advantages_BT, advantages_BT)


def _check_finite(score_B: Tensor, groups: Groups) -> None:
    broken_B = ~score_B.isfinite()
    if bool(broken_B.any()):
        at = int(broken_B.nonzero()[0])
        raise ValueError(f"group {groups.names[at]!r}: the score of sample {at} is {float(score_B[at])}")
