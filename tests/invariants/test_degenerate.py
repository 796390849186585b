"""Every estimator on every degenerate batch: finite, and exactly 0 where there is nothing to learn from.

The table has a row for each batch below and a column for each registered function, so a new one is in it by itself.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megarl.algorithms import advantage, call

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


@pytest.mark.parametrize("score", [NAN, INF, -INF])
@pytest.mark.parametrize("name", advantage.names)
def test_an_undefined_score_is_a_clear_error(name: str, score: float) -> None:
    offered = {"reward_BT": rows([1.0, score]), "mask_BT": torch.ones(2, 3), "group_B": ["a", "b"]}
    with pytest.raises(ValueError, match=f"group 'b': the score of sample 1 is {score}"):
        call(advantage.get(name), offered)
