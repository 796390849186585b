"""Shares of data-parallel ranks: every sample once, costs even, prompts together where that costs nothing; little padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.batch import Batch, Sample
from megarl.batch.packing import cut, pack, plan_runs, prompt_runs, shares

PAIR_COST = 1 / (6 * 1536)  # of a model with hidden size 1536
SEEDS = range(4)


def long_tailed(seed: int, *, groups: int, n: int) -> Batch:
    """Responses of a median of 400 tokens, the longest twenty times that; n of a prompt."""
    g = np.random.default_rng(seed)
    samples = []
    for group in range(groups):
        prompt = g.integers(0, 1000, int(g.integers(50, 400))).tolist()
        for length in np.minimum(g.lognormal(6, 1, n), 8192).astype(int) + 1:
            response = [7] * int(length)
            samples.append(
                Sample("u", str(group), prompt, response, [1] * len(response), [0.0] * len(response), "stop", 0)
            )
    return Batch.from_samples(samples)


def costs(batch: Batch, parts: list[list[int]], share: bool) -> list[float]:
    """By what is packed: rows, and pairs of a row and one that it sees."""
    found = []
    for part in parts:
        packed = pack(batch.take(torch.tensor(part)), share_prompts=share)
        pairs = sum(
            s.length * (s.prefix[1] if s.prefix else 0) + s.length * (s.length + 1) / 2 for s in packed.segments
        )
        found.append(len(packed.tokens) + PAIR_COST * pairs)
    return found


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", SEEDS)
def test_costs_are_even_within_two_per_cent(seed: int, ranks: int, share: bool) -> None:
    batch = long_tailed(seed, groups=16, n=8)
    parts = shares(batch, ranks, pair_cost=PAIR_COST, share_prompts=share)
    assert sorted(i for part in parts for i in part) == list(range(len(batch)))
    found = costs(batch, parts, share)
    assert max(found) / (sum(found) / ranks) - 1 <= 0.02
    assert parts == shares(batch, ranks, pair_cost=PAIR_COST, share_prompts=share)


def test_prompts_stay_together_where_that_is_even() -> None:
    batch = Batch.from_samples(
        [Sample("u", str(i), [i] * 5, [7] * 9, [1] * 9, [0.0] * 9, "stop", 0) for i in range(4) for _ in range(3)]
    )
    parts = shares(batch, 2)
    assert [len(prompt_runs(batch.take(torch.tensor(part)))) for part in parts] == [2, 2]


def test_one_prompt_is_cut_over_ranks() -> None:
    batch = Batch.from_samples([Sample("u", "g", [1] * 5, [7] * 9, [1] * 9, [0.0] * 9, "stop", 0) for _ in range(8)])
    assert sorted(map(len, shares(batch, 4))) == [2, 2, 2, 2]


def test_shares_at_the_edges() -> None:
    batch = long_tailed(0, groups=1, n=2)
    assert shares(batch.take(torch.zeros(0, dtype=torch.long)), 2) == [[], []]
    assert sorted(map(len, shares(batch, 3))) == [0, 1, 1]


@pytest.mark.parametrize(("context", "tensor"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("seed", SEEDS)
def test_padding_is_at_most_three_per_cent(seed: int, context: int, tensor: int) -> None:
    batch = long_tailed(seed, groups=8, n=8)
    real = total = 0
    for part in plan_runs(batch, 8192, share_prompts=context == 1):
        row = pack(batch.take(torch.tensor(part)), share_prompts=True, multiple=tensor, context=context)
        for piece in [row] if context == 1 else [cut(row, rank, context) for rank in range(context)]:
            real, total = real + int(piece.real.sum()), total + len(piece.tokens)
    assert 0 <= total / real - 1 <= 0.03
