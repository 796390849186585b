"""A baseline of its own for each token, weighted by how much noise a trajectory has gathered."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor

from megarl.algorithms.advantages.base import Advantage, advantage, check_choice, check_finite, check_shape, scores
from megarl.algorithms.groups import SINGLETONS, Groups
from megarl.algorithms.masking import as_mask
from megarl.algorithms.rows import ELEMENTS, any_unmasked, masked_sums
from megarl.algorithms.scan import Standing, decaying_sum, over_tokens


@advantage("optimal_token_baseline")
def optimal_token_baseline(
    reward_BT: Tensor,
    mask_BT: Tensor,
    group_B: Sequence[Hashable],
    old_log_probs_BT: Tensor,
    sum_p2_BT: Tensor,
    *,
    singleton: str = "zero",
    eps: float = 1e-8,
) -> Advantage:
    """A_t = G_t - B_t, the baseline of least variance at each token (arXiv:2602.07078):

        B_t = sum_j (W_jt + eps) G_jt / sum_j (W_jt + eps) over the group's trajectories that have a t-th token,
        G_t = sum_{s >= t} r_s,   W_t = sum_{s <= t} w_s,   w_s = 1 - 2 p_s + sum_v p_v^2 at s

    w_s is the squared norm of d log p_s / d logits, and W_t the noise gathered so far. Tokens are counted without observations:
    the t-th of one trajectory is compared with the t-th of another. With no noise at all, B_t is the plain mean.
    singleton: what a token gets that is alone, its trajectory being longer than all others of the group: "zero", or by "score"
    its G_t. returns_BT is G.
    """
    check_choice("singleton", singleton, SINGLETONS)
    mask_BT = as_mask(mask_BT)
    groups = Groups(group_B, any_unmasked(mask_BT))
    check_finite("score", scores(reward_BT, mask_BT), groups)
    for name, values_BT in (("old_log_probs_BT", old_log_probs_BT), ("sum_p2_BT", sum_p2_BT)):
        check_shape(name, values_BT, mask_BT)
    inputs = reward_BT, old_log_probs_BT, sum_p2_BT, mask_BT
    returns_BT, noise_BT = over_tokens(_returns_and_noise, inputs, mask_BT, outputs=2)
    check_finite("noise (1 - 2 p + sum_p2_BT)", masked_sums(noise_BT, mask_BT), groups)
    standing = Standing(mask_BT)
    returns, noise, present = (standing.pull(x_BT) for x_BT in (returns_BT, noise_BT, mask_BT))
    del noise_BT
    for columns in _column_blocks(returns):
        piece = returns[:, columns]  # becomes the advantages
        piece.copy_(_less_baseline(piece, noise[:, columns] + eps, present[:, columns] > 0, groups, singleton))
    advantages_BT = torch.empty_like(returns_BT)
    standing.push(returns, advantages_BT)
    return Advantage(advantages_BT, returns_BT)


def _returns_and_noise(reward: Tensor, log_prob: Tensor, sum_p2: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    energy = (1 - 2 * log_prob.exp() + sum_p2).clamp(min=0) * present
    return decaying_sum(reward, 1.0), decaying_sum(energy.flip(-1), 1.0).flip(-1)


def _less_baseline(returns: Tensor, weight: Tensor, present: Tensor, groups: Groups, singleton: str) -> Tensor:
    """Less the weighted mean over the group, by way of the distances to the smallest: exactly 0 where all are equal."""
    lowest = groups.reduce(torch.where(present, returns, float("inf")), "min", float("inf"))
    above = torch.where(present, returns - lowest, 0.0)
    weight = torch.where(present, weight, 0.0)
    total = groups.reduce(weight, "sum", 0.0)
    baseline = groups.reduce(weight * above, "sum", 0.0) / torch.where(total > 0, total, 1.0)
    alone = groups.reduce(present.to(above.dtype), "sum", 0.0) == 1
    lone = returns if singleton == "score" else torch.zeros_like(returns)
    return torch.where(alone, lone, above - baseline)


def _column_blocks(like_BT: Tensor) -> Iterator[slice]:
    rows, columns = like_BT.shape
    step = max(1, ELEMENTS // max(rows, 1))
    for start in range(0, columns, step):
        yield slice(start, start + step)
