"""Rollout correction, diagnostics and shaping on every degenerate batch: finite, and defined where nothing is there.

A row of the table for each batch: how many values of all functions under all settings are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megarl.algorithms.diagnostics import off_policy_diagnostics
from megarl.algorithms.divergence import KL_ESTIMATORS
from megarl.algorithms.rollout_correction import LEVELS, OUTSIDE, REJECTIONS, CorrectionSettings, correct
from megarl.algorithms.running import RunningStatistics
from megarl.algorithms.shaping import informative, keep_finished, normalize_scores, overlong_penalty, subtract_kl

INF, NAN = math.inf, math.nan
RULES = {name: (0.5, 2.0) if name.endswith("ratio") else 0.5 for name in REJECTIONS}


class Case(NamedTuple):
    """(B, T) each, and (B,) scores of groups."""

    log_probs: Tensor
    behaviour: Tensor
    mask: Tensor
    score: Tensor
    group: str


def case(drifts: list[list[float]], score: list[float], group: str, mask: list[list[int]] | None = None) -> Case:
    drift = torch.tensor(drifts).reshape(len(score), len(drifts[0]) if drifts else 3)
    behaviour = torch.full(drift.shape, -1.5)
    ones = torch.ones(drift.shape)
    return Case(behaviour + drift, behaviour, ones if mask is None else torch.tensor(mask), torch.tensor(score), group)


def with_junk(junk: float) -> Case:
    plain = case([[0.1, -0.2, 0.3]] * 3, [1.0, 0.0, junk], "aaa", [[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    masked = plain.mask == 0
    return plain._replace(
        log_probs=torch.where(masked, junk, plain.log_probs), behaviour=torch.where(masked, -junk, plain.behaviour)
    )


CASES = {
    "an ordinary batch": case([[0.1, -0.1], [0.4, 0.0], [-0.3, 0.2], [0.0, 0.0]], [1.0, 0.0, 0.5, 2.0], "aabb"),
    "equal policies": case([[0.0, 0.0]] * 3, [1.0, 0.0, 1.0], "aab"),
    "a group of one": case([[0.1, 0.2]] * 3, [1.0, 0.0, 3.0], "aab"),
    "a single sample": case([[0.1, 0.2]], [0.7], "a"),
    "all scores equal": case([[0.1, 0.2]] * 7, [0.1] * 7, "aaaaaaa"),
    "huge scores": case([[0.1]] * 4, [1e15, -1e15, 0.0, 1e15], "aaaa"),
    "tiny scores": case([[0.1]] * 4, [1e-30, 0.0, 0.0, 1e-30], "aaaa"),
    "scores that differ by rounding": case([[0.1]] * 4, [1.0, 1.0 + 2**-23, 1.0, 1.0], "aaaa"),
    "a row all masked": case([[0.1, 0.2]] * 3, [1.0, 0.0, NAN], "aaa", [[1, 1], [1, 1], [0, 0]]),
    "everything masked": case([[0.1, 0.2]] * 3, [1.0, 0.0, INF], "aaa", [[0, 0]] * 3),
    "one token": case([[0.1], [5.0]], [1.0, 0.0], "aa"),
    "one token of one sample": case([[0.1]], [1.0], "a"),
    "an empty batch": case([], [], ""),
    "no tokens": case([[], []], [1.0, 0.0], "aa"),
    "a log-ratio of +inf": case([[0.1, INF], [0.0, 0.1]], [1.0, 0.0], "aa"),
    "a log-ratio of -inf": case([[0.1, -INF], [0.0, 0.1]], [1.0, 0.0], "aa"),
    "log-ratios of +inf and -inf in one sequence": case([[INF, -INF], [0.0, 0.1]], [1.0, 0.0], "aa"),
    "log-ratios huge everywhere": case([[3e38, 3e38], [-3e38, -3e38]], [1.0, 0.0], "aa"),
    "long and far": case([[19.0] * 4000, [-19.0] * 4000], [1.0, 0.0], "aa"),
    "NaN where masked": with_junk(NAN),
    "+inf where masked": with_junk(INF),
    "-inf where masked": with_junk(-INF),
}
every_case = pytest.mark.parametrize("name", CASES)


def corrections() -> list[CorrectionSettings]:
    bounds = [(None, None), (None, 2.0), (0.5, 5.0)]
    return [
        CorrectionSettings(level=level, outside=outside, lower=low, upper=high, normalize=normalize, rejection=rules)
        for level, outside, (low, high), normalize, rules in product(
            LEVELS, OUTSIDE, bounds, [True, False], [RULES, {}]
        )
    ]


@every_case
def test_everything_is_finite(name: str, record_invariant: Callable[[str, float, float], None]) -> None:
    batch, broken = CASES[name], 0
    for settings in (*corrections(), CorrectionSettings(bypass=True)):
        result = correct(batch.log_probs, batch.behaviour, batch.mask, settings)
        broken += sum(not math.isfinite(value) for value in result.metrics.values())
        broken += int((~result.weights_BT.isfinite()).sum())
        assert not (result.mask_BT & (batch.mask == 0)).any(), "rejection only takes away"
        assert not result.weights_BT[~result.mask_BT].any() and (result.weights_BT >= 0).all()
    diagnostics = off_policy_diagnostics(batch.log_probs, batch.behaviour, batch.mask)
    broken += sum(not math.isfinite(value) for value in diagnostics.values())
    counts = (batch.mask != 0).any(-1)
    statistics = RunningStatistics()
    shaped = [normalize_scores(batch.score, statistics, counts), normalize_scores(batch.score, statistics, counts)]
    shaped.append(overlong_penalty(batch.mask.sum(-1), 4, 2))
    zeros = torch.zeros(batch.mask.shape)
    for estimator in KL_ESTIMATORS:
        shaped += subtract_kl(zeros, batch.log_probs, batch.behaviour, batch.mask, 0.1, estimator)
    broken += sum(int((~values.isfinite()).sum()) for values in shaped)
    record_invariant(f"shaping and correction, {name}: values not finite", broken, 0)


@every_case
def test_masks_and_groups(name: str) -> None:
    batch = CASES[name]
    counts = (batch.mask != 0).any(-1)
    told = informative(batch.score, list(batch.group), counts)
    values = {
        g: {float(s) for s, o, c in zip(batch.score, batch.group, counts, strict=True) if c and o == g}
        for g in batch.group
    }
    by_rounding = name == "scores that differ by rounding"
    assert told.tolist() == [len(values[g]) > 1 and not by_rounding for g in batch.group]
    assert not keep_finished(batch.mask, torch.ones(len(batch.mask))).any()
    assert torch.equal(keep_finished(batch.mask, torch.zeros(len(batch.mask))), batch.mask != 0)


@pytest.mark.parametrize("score", [NAN, INF, -INF])
def test_an_undefined_score_is_a_clear_error(score: float) -> None:
    scores = torch.tensor([1.0, score])
    with pytest.raises(ValueError, match=f"group 'b': the score of sample 1 is {score}"):
        informative(scores, ["a", "b"])
    with pytest.raises(ValueError, match=f"the score of sample 1 is {score}"):
        normalize_scores(scores, RunningStatistics())


def test_an_undefined_ratio_is_a_clear_error() -> None:
    for p, q in ((NAN, -1.0), (-1.0, NAN), (-INF, -INF), (INF, INF)):
        values = torch.tensor([[p]]), torch.tensor([[q]]), torch.ones(1, 1)
        with pytest.raises(ValueError, match="token 0 of sample 0 has .* which have no ratio"):
            correct(*values, CorrectionSettings(level="token"))
        with pytest.raises(ValueError, match="token 0 of sample 0 has .* which have no ratio"):
            off_policy_diagnostics(*values)
