"""Shaping of rewards against plain loops, and running statistics against the whole stream."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.divergence import KL_ESTIMATORS, kl
from megarl.algorithms.running import RunningStatistics
from megarl.algorithms.shaping import (
    clip_scores,
    informative,
    keep_finished,
    normalize_scores,
    overlong_penalty,
    subtract_kl,
)

NAN, INF = math.nan, math.inf
many = settings(max_examples=60, deadline=None)
numbers = st.floats(-1e6, 1e6, width=32)


@many
@given(
    lengths=st.lists(st.integers(0, 300), max_size=9),
    cache=st.integers(1, 100),
    factor=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_overlong_penalty_is_the_papers_three_cases(lengths: list[int], cache: int, factor: float) -> None:
    limit = 200
    for dtype in (torch.int64, torch.int32, torch.float32):
        result = overlong_penalty(torch.tensor(lengths, dtype=dtype), limit, cache, factor)
        assert result.dtype == torch.float32
        for n, value in zip(lengths, result.tolist(), strict=True):
            if n <= limit - cache:
                expected = 0.0
            elif n <= limit:
                expected = (limit - cache - n) / cache
            else:
                expected = -1.0
            assert value == pytest.approx(factor * expected, abs=1e-6)


@pytest.mark.parametrize(
    ("cache", "factor", "said"),
    [
        (0, 1.0, "cache is 0"),
        (201, 1.0, "cache is 201"),
        (9, -1.0, "factor is -1.0"),
        (9, NAN, "factor"),
        (9, INF, "factor is inf"),
    ],
)
def test_overlong_penalty_refuses(cache: int, factor: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        overlong_penalty(torch.tensor([1]), 200, cache, factor)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_keep_finished(dtype: torch.dtype) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]]).to(dtype)
    before = mask.clone()
    result = keep_finished(mask, torch.tensor([0, 1, 1]).to(dtype))
    assert result.tolist() == [[True, True, False], [False] * 3, [False] * 3] and torch.equal(mask, before)
    with pytest.raises(ValueError, match=r"truncated_B is \(2,\), the mask is \(3, 3\)"):
        keep_finished(mask, torch.tensor([0, 1]))


def test_clip_scores() -> None:
    scores = torch.tensor([-INF, -2.0, 0.5, 3.0, INF, NAN])
    assert clip_scores(scores, -1.0, 1.0)[:5].tolist() == [-1.0, -1.0, 0.5, 1.0, 1.0]
    assert clip_scores(scores, upper=1.0)[:5].tolist() == [-INF, -2.0, 0.5, 1.0, 1.0]
    assert clip_scores(scores, lower=-1.0)[:5].tolist() == [-1.0, -1.0, 0.5, 3.0, INF]
    assert torch.equal(clip_scores(scores)[:5], scores[:5])
    clip_scores(scores).zero_()
    assert scores[1] == -2.0, "a copy, whether anything was clipped or not"
    assert not clip_scores(torch.ones(2, requires_grad=True), 0.0, 1.0).requires_grad
    with pytest.raises(ValueError, match="upper is nan"):
        clip_scores(scores, upper=NAN)
    assert clip_scores(scores, -1.0, 1.0)[5].isnan()
    assert clip_scores(torch.tensor([2], dtype=torch.int64), upper=1).dtype == torch.float32
    with pytest.raises(ValueError, match="lower is 2 and upper is 1"):
        clip_scores(scores, 2, 1)


@many
@given(stream=st.lists(numbers, max_size=30), cuts=st.lists(st.integers(0, 30), max_size=5), ranks=st.integers(1, 3))
def test_running_statistics_are_those_of_the_whole_stream(stream: list[float], cuts: list[int], ranks: int) -> None:
    """Cut into updates of any size, empty ones too, dealt out over ranks and merged; saved and loaded on the way."""
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    parts = [RunningStatistics() for _ in range(ranks)]
    for i, (start, end) in enumerate(pairwise(edges)):
        parts[i % ranks].update(torch.tensor(stream[start:end]))
    merged = RunningStatistics()
    for part in parts:
        restored = RunningStatistics()
        restored.load_state_dict(json.loads(json.dumps(part.state_dict())))
        assert restored.state_dict() == part.state_dict()
        merged.merge(restored)
    assert merged.count == len(stream)
    mean = math.fsum(stream) / max(1, len(stream))
    variance = math.fsum((x - mean) ** 2 for x in stream) / (len(stream) - 1) if len(stream) > 1 else 0.0
    scale = max((abs(x) for x in stream), default=0.0)
    assert merged.mean == pytest.approx(mean, rel=1e-12, abs=1e-13 * scale)
    assert merged.variance == pytest.approx(variance, rel=1e-9, abs=1e-20 * scale * scale)
    assert merged.std == math.sqrt(merged.variance)


@many
@given(value=st.one_of(numbers, st.floats(-1e6, 1e6)), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_a_stream_of_equal_values_has_no_variance_exactly(value: float, sizes: list[int]) -> None:
    statistics = RunningStatistics()
    for size in sizes:
        statistics.update(torch.full((size,), value, dtype=torch.float64))
    assert statistics.variance == 0.0 and statistics.mean == value


def test_running_statistics_keep_small_spreads_on_large_values() -> None:
    """Where a sum of squares less a squared sum would have no digit left."""
    statistics = RunningStatistics()
    for start in range(0, 1000, 10):
        statistics.update(1e9 + torch.arange(start, start + 10, dtype=torch.float64) % 2)
    assert statistics.variance == pytest.approx(0.25 * 1000 / 999, rel=1e-12)


def test_running_statistics_refuse_what_would_never_leave() -> None:
    statistics = RunningStatistics()
    with pytest.raises(ValueError, match="value 1 of 2 is nan; running statistics take finite numbers"):
        statistics.update(torch.tensor([0.0, NAN]))
    assert statistics.state_dict() == {"count": 0, "mean": 0.0, "squares": 0.0}
    with pytest.raises(ValueError, match="running statistics are count, mean and squares"):
        statistics.load_state_dict({"count": 1})
    good = {"count": 3, "mean": 0.5, "squares": 2.0}
    for wrong in (
        {"squares": -1.0},
        {"squares": INF},
        {"mean": NAN},
        {"mean": "0"},
        {"count": 2.5},
        {"count": -1},
        {"count": 1},
        {"count": 0, "squares": 0.0},
        {"count": True, "squares": 0.0},
    ):
        with pytest.raises(ValueError, match="running statistics cannot be .*: no stream of finite numbers has these"):
            statistics.load_state_dict(good | wrong)
    assert statistics.state_dict() == {"count": 0, "mean": 0.0, "squares": 0.0}
    with pytest.raises(ValueError, match="too far apart for running statistics: their squares overflow"):
        normalize_scores(torch.tensor([1e200, -1e200], dtype=torch.float64), statistics)
    assert statistics.state_dict() == {"count": 0, "mean": 0.0, "squares": 0.0}
    statistics.load_state_dict(good)
    assert statistics.std == 1.0


@many
@given(
    batches=st.lists(st.lists(numbers, max_size=8), max_size=5), center=st.booleans(), junk=st.sampled_from([NAN, INF])
)
def test_normalised_scores_are_those_of_the_stream_so_far(
    batches: list[list[float]], center: bool, junk: float
) -> None:
    statistics, seen = RunningStatistics(), []
    for batch in batches:
        seen += batch
        scores, counts = torch.tensor([*batch, junk]), torch.tensor([True] * len(batch) + [False])
        before = scores.clone()
        result = normalize_scores(scores, statistics, counts, center=center)
        assert torch.equal(scores.nan_to_num(), before.nan_to_num())
        assert result.dtype == torch.float32 and result[-1] == 0
        values = np.array(seen)
        std = values.std(ddof=1) if len(seen) > 1 else 0.0
        centred = np.array(batch) - (values.mean() if center and len(seen) else 0.0)
        expected = centred / (std + 1e-8) if std > 0 else centred
        assert result[:-1].tolist() == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-4)
        frozen = statistics.state_dict()
        assert torch.equal(normalize_scores(scores, statistics, counts, center=center, update=False), result)
        assert statistics.state_dict() == frozen


def test_normalisation_of_equal_scores_is_exactly_zero_and_of_undefined_ones_an_error() -> None:
    statistics = RunningStatistics()
    for size in (3, 1, 7):
        assert not normalize_scores(torch.full((size,), 0.1), statistics).any()
    with pytest.raises(ValueError, match="the score of sample 1 is inf"):
        normalize_scores(torch.tensor([0.0, INF]), statistics)
    assert statistics.count == 11


@many
@given(seed=st.integers(0, 10**6), estimator=st.sampled_from(KL_ESTIMATORS), junk=st.sampled_from([NAN, INF, -INF]))
def test_kl_is_taken_from_the_reward_of_each_token(seed: int, estimator: str, junk: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    reward, p, q = (torch.randn(3, 4, generator=generator) for _ in range(3))
    mask = torch.rand(3, 4, generator=generator) < 0.7
    result = subtract_kl(reward, p, q, mask, 0.2, estimator)
    expected = torch.where(mask, reward - 0.2 * kl(p, q, mask, estimator), 0.0)
    torch.testing.assert_close(result.reward_BT, expected)
    assert torch.equal(result.kl_BT, kl(p, q, mask, estimator))
    dirty = [torch.where(mask, x, junk) for x in (reward, p, q)]
    assert all(torch.equal(a, b) for a, b in zip(subtract_kl(*dirty, mask, 0.2, estimator), result, strict=True))
    assert not subtract_kl(reward, p.requires_grad_(), q, mask, 0.2, estimator).reward_BT.requires_grad


def test_kl_in_reward_refuses() -> None:
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match="coefficient is -0.1; it must be at least 0"):
        subtract_kl(ones, ones, ones, ones, -0.1)
    with pytest.raises(ValueError, match="coefficient is inf"):
        subtract_kl(ones, ones, ones, ones, INF)
    for pair, name in (((torch.ones(1, 1), ones), "log_probs_BT"), ((ones, torch.ones(1, 1)), "ref_log_probs_BT")):
        with pytest.raises(ValueError, match=rf"^{name} is \(1, 1\), the mask is \(1, 2\)"):
            subtract_kl(ones, *pair, ones, 0.1)
    with pytest.raises(ValueError, match=r"reward_BT is \(1,\), the mask is \(1, 2\)"):
        subtract_kl(torch.ones(1), ones, ones, ones, 0.1)


@many
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from(["a", 7, ("x", 1), None]), st.booleans())
    ),
    seed=st.integers(0, 10**6),
    junk=st.sampled_from([NAN, INF, 5.0]),
)
def test_informative_groups(rows: list[tuple[float, Hashable, bool]], seed: int, junk: float) -> None:
    """By its definition, in any order, whatever a sample that does not count holds."""
    order = np.random.default_rng(seed).permutation(len(rows))
    shuffled = [rows[i] for i in order]
    scores = torch.tensor([score if counts else junk for score, _, counts in shuffled])
    names, counts = [name for _, name, _ in shuffled], torch.tensor([c for _, _, c in shuffled], dtype=torch.bool)
    expected = [len({score for score, other, c in rows if c and other == name}) > 1 for name in names]
    result = informative(scores, names, counts)
    assert result.dtype == torch.bool and result.tolist() == expected


def test_informative_needs_finite_scores() -> None:
    with pytest.raises(ValueError, match="group 'b': the score of sample 1 is nan"):
        informative(torch.tensor([0.0, NAN]), ["a", "b"])
    assert informative(torch.tensor([1.0, 2.0, 1.0]), ["a", "a", "b"]).tolist() == [True, True, False]


def test_scores_that_differ_by_the_order_of_a_sum_are_one_score() -> None:
    """As estimators see them: what would have advantage 0 is not informative."""
    parts = torch.tensor([[0.1, 0.5, 0.7], [0.5, 0.7, 0.1]])
    first, other = parts.sum(1).tolist()
    assert first != other
    for sign in (1, -1):
        sums = sign * torch.tensor([first, other, other, sign * 0.0, sign * 1e-30, first, first + 1e-5])
        told = informative(sums, ["a", "a", "a", "b", "b", "c", "c"])
        assert told.tolist() == [False] * 3 + [True] * 4
    double = torch.tensor([first, other], dtype=torch.float64)
    assert informative(double, ["a", "a"]).all(), "in float64 that is a difference"


def test_scores_of_any_size_are_normalised() -> None:
    scores = torch.tensor([3e38, -3e38, -3e38])
    result = normalize_scores(scores, RunningStatistics())
    assert result.tolist() == pytest.approx([2 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)])


def test_shapes_that_do_not_fit_are_named() -> None:
    two, square = torch.ones(2), torch.ones(2, 2)
    for function, said in (
        (lambda: informative(square, [0, 0]), r"score_B is \(2, 2\); it must be \(B,\)"),
        (lambda: informative(two, [0, 0], torch.ones(2, 1)), r"counts_B is \(2, 1\), score_B is \(2,\)"),
        (lambda: normalize_scores(two, RunningStatistics(), torch.ones(3)), r"counts_B is \(3,\), score_B is \(2,\)"),
        (lambda: overlong_penalty(square, 4, 2), r"length_B is \(2, 2\)"),
        (lambda: keep_finished(two, two), r"mask_BT is \(2,\); it must be \(B, T\)"),
    ):
        with pytest.raises(ValueError, match=said):
            function()
