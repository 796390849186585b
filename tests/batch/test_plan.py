"""Plans: every index once, within the budget, few, even, and the same every time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megarl.batch import balance, micro_batches

SEEDS = range(20)


def random_lengths(seed: int) -> list[int]:
    generator = np.random.default_rng(seed)
    count = int(generator.integers(1, 200))
    return np.minimum(generator.lognormal(4, 1, count), 3000).astype(int).tolist()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("budget", [1, 100, 1000, 10**6])
def test_micro_batches_cover_everything_within_the_budget(seed: int, budget: int) -> None:
    lengths = random_lengths(seed)
    plan = micro_batches(lengths, budget)
    assert sorted(i for part in plan for i in part) == list(range(len(lengths)))
    assert all(part for part in plan)
    for part in plan:
        assert sum(lengths[i] for i in part) <= budget or len(part) == 1
    longest = [max(lengths[i] for i in part) for part in plan]
    assert longest == sorted(longest, reverse=True)
    assert micro_batches(lengths, budget) == plan


@pytest.mark.parametrize("seed", SEEDS)
def test_micro_batches_are_few_and_even(seed: int) -> None:
    lengths, budget = random_lengths(seed), 5000
    plan = micro_batches(lengths, budget)
    ideal = math.ceil(sum(lengths) / budget)
    assert len(plan) <= ideal * 11 / 9 + 1  # the bound of first-fit decreasing, over what no packing can beat
    flat = [lengths[i] for part in plan for i in part]
    if flat != sorted(flat, reverse=True):  # similar lengths stand together, unless that takes more micro-batches
        runs, room = 0, -1
        for length in sorted(lengths, reverse=True):
            runs, room = (runs + 1, budget - length) if length > room else (runs, room - length)
        assert len(plan) < runs


def test_few_goes_before_neighbours() -> None:
    """Runs of neighbours need three micro-batches here, packing two."""
    lengths = [6, 6, 4, 4]
    assert [sum(lengths[i] for i in part) for part in micro_batches(lengths, 10)] == [10, 10]


def test_an_even_cut_instead_of_a_full_one_and_a_rest() -> None:
    plan = micro_batches([10] * 12, 110)
    assert [len(part) for part in plan] == [6, 6]


def test_at_least() -> None:
    lengths = random_lengths(0)
    for wanted in (2, 7, len(lengths), len(lengths) + 5):
        plan = micro_batches(lengths, 10**6, at_least=wanted)
        assert len(plan) == min(wanted, len(lengths))
        assert sorted(i for part in plan for i in part) == list(range(len(lengths)))
    assert [len(part) for part in micro_batches([5, 5, 5, 5], 100, at_least=2)] == [2, 2]


def test_micro_batches_at_the_edges() -> None:
    assert micro_batches([], 10) == []
    assert micro_batches([99], 10) == [[0]]
    assert micro_batches([0, 0], 1) == [[0, 1]]
    assert micro_batches([3, 50, 3], 10) == [[1], [0, 2]]
    with pytest.raises(ValueError, match="budget of 0 tokens"):
        micro_batches([1], 0)
    with pytest.raises(ValueError, match="length is negative"):
        micro_batches([1, -1], 10)


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_balance(seed: int, equal_counts: bool) -> None:
    costs = [float(x) for x in random_lengths(seed)]
    for k in (1, 2, 3, 8):
        parts = balance(costs, k, equal_counts)
        assert len(parts) == k and sorted(i for part in parts for i in part) == list(range(len(costs)))
        assert all(part == sorted(part) for part in parts)
        loads = [sum(costs[i] for i in part) for part in parts]
        if equal_counts:
            sizes = [len(part) for part in parts]
            assert max(sizes) - min(sizes) <= 1
        else:
            ranked = sorted(costs, reverse=True)
            pigeonhole = ranked[k - 1] + ranked[k] if len(costs) > k else 0.0
            best = max(sum(costs) / k, *costs, pigeonhole)
            assert max(loads) <= best * 4 / 3 + max(costs) / 3
        assert balance(costs, k, equal_counts) == parts


@pytest.mark.parametrize("equal_counts", [False, True])
def test_balance_comes_close_to_even(equal_counts: bool) -> None:
    """Response lengths over 8 ranks: a few per cent above what nothing can beat, where neighbours are far off."""
    ratios = []
    for seed in SEEDS:
        costs = np.minimum(np.random.default_rng(seed).lognormal(4, 1, 200), 3000).tolist()
        loads = [sum(costs[i] for i in part) for part in balance(costs, 8, equal_counts)]
        ratios.append(max(loads) / max(sum(costs) / 8, *costs))
    assert np.mean(ratios) < 1.01 and max(ratios) < 1.03


def test_balance_at_the_edges() -> None:
    assert balance([], 2) == [[], []]
    assert balance([5.0], 3) == [[0], [], []]
    assert balance([1, 1, 1, 1], 2, equal_counts=True) == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match="among 0"):
        balance([1.0], 0)
