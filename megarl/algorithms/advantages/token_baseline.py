"""A baseline of its own for each token, weighted by how much noise a trajectory has gathered."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import reduce

import torch
from torch import Tensor

from megarl.algorithms.advantages.base import Advantage, advantage, check_finite, check_shape
from megarl.algorithms.advantages.options import check_positive, check_singleton
from megarl.algorithms.groups import Groups
from megarl.algorithms.masking import as_mask, working
from megarl.algorithms.rows import any_unmasked, masked, rows_at_once
from megarl.algorithms.scan import Standing, decaying_sum, running_sum


@advantage("optimal_token_baseline")
@torch.no_grad()
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
    check_singleton("optimal_token_baseline", singleton)
    eps = check_positive("optimal_token_baseline", "eps", eps, 1e-20, 1.0)  # what float32 can divide by
    mask_BT = as_mask(mask_BT)
    inputs = {"reward_BT": reward_BT, "old_log_probs_BT": old_log_probs_BT, "sum_p2_BT": sum_p2_BT}
    for name, values_BT in inputs.items():
        check_shape(name, values_BT, mask_BT)
    groups = Groups(group_B, any_unmasked(mask_BT))
    dtype = reduce(torch.promote_types, (working(x_BT[:0]).dtype for x_BT in inputs.values()))
    advantages_BT, returns_BT = (torch.empty(mask_BT.shape, dtype=dtype, device=mask_BT.device) for _ in range(2))
    score_B, noise_B, baseline_B = advantages_BT.new_zeros(3, len(mask_BT))
    for sample_GN in groups.blocks(rows_at_once(mask_BT)):
        rows = sample_GN.flatten()
        standing = Standing(mask_BT.index_select(0, rows))
        reward, log_prob, sum_p2 = (standing.pull(x_BT.index_select(0, rows)).to(dtype) for x_BT in inputs.values())
        returns = decaying_sum(reward, 1.0)
        noise = running_sum((1 - 2 * log_prob.exp_() + sum_p2).clamp_(min=0))
        score_B[rows], noise_B[rows] = returns[:, :1].sum(-1), noise[:, -1:].sum(-1)
        pieces = (x.view(*sample_GN.shape, standing.width) for x in (returns, noise.add_(eps), standing.present()))
        advantages, baseline = _less_baseline(*pieces, singleton=singleton)
        baseline_B[rows] = baseline.sum((1, 2)).repeat_interleave(sample_GN.shape[1])
        for out_BT, values in ((returns_BT, returns), (advantages_BT, advantages.view_as(returns))):
            out_BT.index_copy_(0, rows, standing.push(values, values.new_empty(len(rows), mask_BT.shape[1])))
    check_finite("score", score_B, groups)
    check_finite("noise (1 - 2 p + sum_p2_BT)", noise_B, groups)
    check_finite("sum of baselines above the lowest return", baseline_B, groups)  # not so where they are too far apart
    return Advantage(advantages_BT, returns_BT)


def _less_baseline(returns: Tensor, weight: Tensor, present: Tensor, *, singleton: str) -> tuple[Tensor, Tensor]:
    """(G, N, W) less the weighted mean over N, by way of the distances to the smallest: exactly 0 where all are equal, and where
    one is alone. Beside it that mean of the distances, (G, 1, W): finite where they are."""
    lowest = torch.where(present, returns, float("inf")).amin(1, keepdim=True)
    above, weight = masked(returns - lowest, present), masked(weight, present)
    total = weight.sum(1, keepdim=True)
    baseline = (weight * above).sum(1, keepdim=True).div_(total.add_(total == 0))
    advantages = masked(above - baseline, present)
    if singleton == "score":
        advantages += masked(returns, present & (present.sum(1, keepdim=True) == 1))
    return advantages, baseline
