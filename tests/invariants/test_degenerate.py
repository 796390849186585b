"""Every estimator and loss on every degenerate batch: finite, and exactly 0 where there is nothing to learn from.

The table has a row for each batch below and a column for each registered function, so a new one is in it by itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megarl.algorithms import Objective, advantage, call, denominators, kl
from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.divergence import KL_ESTIMATORS
from megarl.algorithms.policy_losses import policy_loss

INF, NAN = math.inf, math.nan


class Case(NamedTuple):
    """What a step could hand to the algorithms. (B, T) each."""

    reward: Tensor
    mask: Tensor
    group: list[str]
    log_probs: Tensor
    old_log_probs: Tensor
    nothing_to_learn: bool = False  # every advantage must be exactly 0


def rows(values: list[float], columns: int = 3) -> Tensor:
    """The value of each row at its last token, 0 before."""
    result = torch.zeros(len(values), columns)
    if columns:
        result[:, -1] = torch.tensor(values)
    return result


def case(reward: Tensor, group: str, mask: Tensor | None = None, drift: float = 0.1, **other: bool) -> Case:
    old = torch.full(reward.shape, -1.5)
    return Case(reward, torch.ones(reward.shape) if mask is None else mask, list(group), old + drift, old, **other)


def with_junk(junk: float) -> Case:
    """Masked at the end, in the middle, and over a whole row; junk in all of it."""
    plain = case(
        rows([1.0, 0.0, 0.0, 2.0], 4), "aabb", torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [0] * 4, [1, 1, 1, 1]]).float()
    )
    masked = plain.mask == 0
    filled = [torch.where(masked, junk, x) for x in (plain.reward, plain.log_probs, plain.old_log_probs)]
    return Case(filled[0], plain.mask, plain.group, filled[1], filled[2])


def with_log_probs(log_prob: float, old_log_prob: float) -> Case:
    plain = case(rows([1.0, 0.0, 0.0, 1.0]), "aabb")
    log_probs, old = plain.log_probs.clone(), plain.old_log_probs.clone()
    log_probs[:, 1], old[:, 1] = log_prob, old_log_prob
    return plain._replace(log_probs=log_probs, old_log_probs=old)


CASES = {
    "an ordinary batch": case(rows([1.0, 0.0, 0.5, 2.0]), "aabb"),
    "a group of one": case(rows([1.0, 0.0, 3.0]), "aab"),
    "only groups of one": case(rows([1.0, 0.0, 3.0]), "abc", nothing_to_learn=True),
    "a single sample": case(rows([0.7]), "a", nothing_to_learn=True),
    "all rewards equal": case(rows([0.1] * 7), "aaaaaaa", nothing_to_learn=True),
    "all rewards 0": case(rows([0.0] * 4), "abab", nothing_to_learn=True),
    "equal within each group": case(rows([0.1, 0.7, 0.1, 0.7, 0.1, 0.7]), "ababab", nothing_to_learn=True),
    "rewards that differ by rounding": case(rows([1.0, 1.0 + 2**-23, 1.0, 1.0]), "aaaa"),
    "huge rewards": case(rows([1e15, -1e15, 0.0, 1e15]), "aaaa"),
    "tiny rewards": case(rows([1e-30, 0.0, 0.0, 1e-30]), "aaaa"),
    "a row all masked": case(rows([1.0, 0.0, 5.0]), "aaa", torch.tensor([[1.0] * 3, [1.0] * 3, [0.0] * 3])),
    "a group all masked": case(rows([1.0, 0.0, 5.0]), "aab", torch.tensor([[1.0] * 3, [1.0] * 3, [0.0] * 3])),
    "everything masked": case(rows([1.0, 0.0, 5.0]), "aaa", torch.zeros(3, 3), nothing_to_learn=True),
    "one token": case(rows([1.0, 0.0], 1), "aa"),
    "one token of one sample": case(rows([1.0], 1), "a", nothing_to_learn=True),
    "an empty batch": case(torch.zeros(0, 3), "", nothing_to_learn=True),
    "no tokens": case(torch.zeros(2, 0), "aa", nothing_to_learn=True),
    "a log-ratio of +inf": with_log_probs(-1.0, -INF),
    "a log-ratio of -inf": with_log_probs(-INF, -1.0),
    "a huge log-ratio": with_log_probs(-1.0, -3e38),
    "NaN where masked": with_junk(NAN),
    "+inf where masked": with_junk(INF),
    "-inf where masked": with_junk(-INF),
}
every_case = pytest.mark.parametrize("batch", CASES.values(), ids=CASES.keys())


@every_case
@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("singleton", ["zero", "score"])
@pytest.mark.parametrize("name", advantage.names)
def test_estimators(name: str, singleton: str, normalize_std: bool, batch: Case) -> None:
    offered = {"reward_BT": batch.reward, "mask_BT": batch.mask, "group_B": batch.group}
    result = call(advantage.get(name), {**offered, "singleton": singleton, "normalize_std": normalize_std})
    for values in result:
        assert values.shape == batch.mask.shape and values.dtype == torch.float32
        assert values.isfinite().all()
        assert not values[batch.mask == 0].any()
    if batch.nothing_to_learn and singleton == "zero":
        assert not result.advantages_BT.any()


@every_case
@pytest.mark.parametrize("advantages", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("clip_dual", [3.0, None])
@pytest.mark.parametrize("name", policy_loss.names)
def test_policy_losses(name: str, clip_dual: float | None, advantages: float, batch: Case) -> None:
    log_probs = batch.log_probs.clone().requires_grad_()
    masked = batch.mask == 0
    signal = torch.where(masked, NAN, torch.full(batch.mask.shape, advantages))
    offered = {"log_probs_BT": log_probs, "old_log_probs_BT": batch.old_log_probs, "advantages_BT": signal}
    offered |= {"mask_BT": batch.mask, "clip_low": 0.2, "clip_high": 0.2, "clip_dual": clip_dual}
    result = call(policy_loss.get(name), offered)
    assert result.loss_BT.isfinite().all() and result.ratio_BT.isfinite().all()
    result.loss_BT.sum().backward()
    assert log_probs.grad is not None and log_probs.grad.isfinite().all()
    assert not log_probs.grad[masked].any()
    beyond = ~masked & ((log_probs.detach() - batch.old_log_probs).abs() > 20)
    assert not log_probs.grad[beyond].any()


@every_case
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl(estimator: str, batch: Case) -> None:
    log_probs = batch.log_probs.clone().requires_grad_()
    values = kl(log_probs, batch.old_log_probs, batch.mask, estimator)
    values.sum().backward()
    assert values.isfinite().all() and not values[batch.mask == 0].any()
    assert log_probs.grad is not None and log_probs.grad.isfinite().all() and not log_probs.grad[batch.mask == 0].any()


@every_case
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", policy_loss.names)
def test_the_whole_objective(name: str, aggregation: str, batch: Case) -> None:
    """From rewards to the gradient, with entropy and KL; nothing unmasked: loss and gradient are exactly 0."""
    advantages = advantage.get("grpo")(batch.reward, batch.mask, batch.group).advantages_BT
    entropy = torch.where(batch.mask == 0, NAN, torch.full(batch.mask.shape, 0.5)).requires_grad_()
    log_probs = batch.log_probs.clone().requires_grad_()
    data = {"old_log_probs": batch.old_log_probs, "ref_log_probs": batch.old_log_probs}
    data |= {"advantages": advantages, "loss_mask": batch.mask}
    objective = Objective(policy_loss=name, aggregation=aggregation, entropy_coefficient=0.01, kl_coefficient=0.1)
    result = objective(log_probs, entropy, data, denominators(batch.mask))
    result.loss.backward()
    assert result.loss.isfinite() and log_probs.grad is not None and entropy.grad is not None
    assert all(value.isfinite() for value in (*result.sums.values(), *result.maxima.values()))
    for gradient in (log_probs.grad, entropy.grad):
        assert gradient.isfinite().all() and not gradient[batch.mask == 0].any()
    if not batch.mask.any():
        assert result.loss.item() == 0 and not log_probs.grad.any() and not entropy.grad.any()


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 3e38])
def test_junk_changes_nothing(junk: float) -> None:
    """Not only finite: bit for bit what it is with 0 in the masked places."""

    def everything(batch: Case) -> list[Tensor]:
        log_probs = batch.log_probs.clone().requires_grad_()
        advantages = advantage.get("grpo")(batch.reward, batch.mask, batch.group).advantages_BT
        data = {"old_log_probs": batch.old_log_probs, "ref_log_probs": batch.old_log_probs}
        data |= {"advantages": advantages, "loss_mask": batch.mask}
        result = Objective(kl_coefficient=0.1)(log_probs, batch.log_probs, data, denominators(batch.mask))
        result.loss.backward()
        assert log_probs.grad is not None
        return [advantages, log_probs.grad, result.loss.detach(), *result.sums.values(), *result.maxima.values()]

    clean, dirty = everything(with_junk(0.0)), everything(with_junk(junk))
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


@pytest.mark.parametrize("score", [NAN, INF, -INF])
@pytest.mark.parametrize("name", advantage.names)
def test_an_undefined_score_is_a_clear_error(name: str, score: float) -> None:
    offered = {"reward_BT": rows([1.0, score]), "mask_BT": torch.ones(2, 3), "group_B": ["a", "b"]}
    with pytest.raises(ValueError, match=f"group 'b': the score of sample 1 is {score}"):
        call(advantage.get(name), offered)
