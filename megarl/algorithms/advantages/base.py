"""What the estimators share: their result, their registry, scores of samples in groups, one value a sample to its tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.groups import Groups
from megarl.algorithms.masking import as_mask
from megarl.algorithms.registry import Registry
from megarl.algorithms.rows import any_unmasked, fill_masked, masked_sums


class Advantage(NamedTuple):
    """float32 (float64 where the rewards are), 0 where masked."""

    advantages_BT: Tensor
    returns_BT: Tensor  # what a critic would learn; the advantages themselves where an estimator has no returns


AdvantageFunction = Callable[..., Advantage]

advantage: Registry[AdvantageFunction] = Registry(
    "advantage estimator",
    inputs=(
        "reward_BT",
        "mask_BT",
        "group_B",  # a hashable name a sample
        "values_BT",  # the critic's
        "baseline_B",  # score of the greedy answer to the same prompt
        "old_log_probs_BT",
        "entropy_BT",
        "sum_p2_BT",  # sum over the vocabulary of squared probabilities
        "reward_parts_BK",  # K named parts of each sample's reward
    ),
    settings=("gamma", "lam", "normalize_std"),
)


def get_advantage(name: str) -> AdvantageFunction:
    """The estimator of this name, or the user's at "package.module.function". ValueError where there is none, or where
    it asks for what the trainer does not have."""
    return advantage.get(name)


def grouped(reward_BT: Tensor, mask_BT: Tensor, group_B: Sequence[Hashable] | Tensor) -> tuple[Tensor, Tensor, Groups]:
    """The mask as bool, score_B and the groups. A sample's score is the sum of its rewards over unmasked tokens; a
    sample with none has no score and is in nobody's statistics; scores of a group that differ by rounding alone are made equal.
    ValueError on a score that is not finite."""
    mask_BT = as_mask(mask_BT)
    score_B = scores(reward_BT, mask_BT)
    groups = Groups(group_B, any_unmasked(mask_BT))
    check_finite("score", score_B, groups)
    return mask_BT, groups.levelled(score_B), groups


def scores(reward_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B,) the sum of each sample's rewards over unmasked tokens."""
    check_shape("reward_BT", reward_BT, mask_BT)
    return masked_sums(reward_BT, mask_BT)


def check_shape(name: str, values_BT: Tensor, mask_BT: Tensor) -> None:
    if values_BT.dim() != 2 or values_BT.shape != mask_BT.shape:
        raise ValueError(f"{name} {tuple(values_BT.shape)} and mask_BT {tuple(mask_BT.shape)} must be one (B, T)")


def check_finite(what: str, values_B: Tensor, groups: Groups | None = None) -> None:
    finite_B = values_B.isfinite()
    if not bool(finite_B.all()):
        at = int((~finite_B).nonzero()[0])
        where = f"group {groups.names[at]!r}: " if groups else ""
        raise ValueError(f"{where}the {what} of sample {at} is {float(values_B[at])}")


def spread(advantage_B: Tensor, mask_BT: Tensor, dtype: torch.dtype | None = None) -> Advantage:
    """One advantage a sample, written to each of its unmasked tokens, in this precision (None: its own). Advantages and returns
    are one tensor. ValueError where the precision cannot hold an advantage: scores were too far apart for it."""
    advantage_B = advantage_B.to(dtype or advantage_B.dtype)
    check_finite("advantage", advantage_B)
    advantages_BT = advantage_B.new_empty(mask_BT.shape)
    fill_masked(advantages_BT, mask_BT, lambda rows, _: advantage_B[rows, None])
    return Advantage(advantages_BT, advantages_BT)
