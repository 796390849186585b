"""Packed rows say the same as the samples they were made of, and plans hold every sample once, within the budget."""

from __future__ import annotations

import pytest
import torch

from megarl.batch import Batch, Sample
from megarl.batch.packing import Packed, pack, plan_runs, prompt_runs
from tests.megatron.harness import random_batch


def batch_of(*samples: tuple[list[int], list[int]]) -> Batch:
    return Batch.from_samples(
        [
            Sample("u", "g", prompt, response, [1] * len(response), [0.0] * len(response), "stop", 0)
            for prompt, response in samples
        ]
    )


def histories(packed: Packed) -> list[tuple[list[int], list[int]]]:
    """What every packed row sees, itself included: its tokens and their positions."""
    seen: list[tuple[list[int], list[int]]] = [([], [])] * len(packed.tokens)
    for segment in packed.segments:
        prefix = range(segment.prefix[0], sum(segment.prefix)) if segment.prefix else range(0)
        for row in range(segment.start, segment.start + segment.length):
            rows = [*prefix, *range(segment.start, row + 1)]
            seen[row] = (packed.tokens[rows].tolist(), packed.positions[rows].tolist())
    return seen


def check(batch: Batch, packed: Packed) -> None:
    """Every response token is predicted by a row that sees exactly the tokens before it, at their positions."""
    seen = histories(packed)
    rows = batch["tokens"].split(batch.total_lengths.tolist())
    expected = []
    for row, prompt in zip(rows, batch.prompt_lengths.tolist(), strict=True):
        expected += [(row[:i].tolist(), list(range(i)), int(row[i])) for i in range(prompt, len(row))]
    told = [(*seen[at], target) for at, target in zip(packed.predicts.tolist(), packed.targets.tolist(), strict=True)]
    assert told == expected


@pytest.mark.parametrize("multiple", [1, 2, 8])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_predicted_from_what_stands_before_it(seed: int, share: bool, multiple: int) -> None:
    batch = random_batch(50, seed=seed)
    packed = pack(batch, share_prompts=share, multiple=multiple)
    check(batch, packed)
    assert len(packed.tokens) == len(packed.positions) and len(packed.tokens) % multiple == 0
    used = sum(s.length for s in packed.segments)
    assert used <= len(packed.tokens) < used + multiple


def test_a_shared_prompt_is_there_once() -> None:
    batch = batch_of(([1, 2, 3, 4], [5, 6, 7]), ([1, 2, 3, 4], [8, 9]), ([1, 2, 3, 4], [5]))
    shared, single = (pack(batch, share_prompts=share) for share in (True, False))
    assert shared.tokens.tolist() == [1, 2, 3, 4, 5, 6, 8]  # the last token of a sequence predicts nothing
    assert single.tokens.tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 8, 1, 2, 3, 4]
    assert shared.longest == 6 and single.longest == 6
    for packed in (shared, single):
        check(batch, packed)


def test_samples_without_a_response() -> None:
    batch = batch_of(([1, 2], []), ([1, 2], [3, 4]), ([5], []), ([6], [7]))
    for share in (True, False):
        packed = pack(batch, share_prompts=share)
        check(batch, packed)
        assert packed.targets.tolist() == [3, 4, 7]


def test_only_neighbours_with_the_same_prompt_share_it() -> None:
    batch = batch_of(([1, 2], [3]), ([1, 2], [4]), ([1], [2, 3]), ([1, 2], [5]), ([2, 1], [5]))
    assert prompt_runs(batch) == [[0, 1], [2], [3], [4]]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [1, 15, 40, 10_000])
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_holds_every_sample_once_within_the_budget(seed: int, budget: int, share: bool) -> None:
    batch = random_batch(50, seed=seed, groups=5, n=4)
    plan = plan_runs(batch, budget, share_prompts=share)
    assert sorted(i for part in plan for i in part) == list(range(len(batch)))
    for part in plan:
        piece = batch.take(torch.tensor(part))
        packed = pack(piece, share_prompts=share)
        assert len(packed.tokens) <= budget or len(part) == 1
        check(piece, packed)


def test_sharing_needs_fewer_micro_batches() -> None:
    prompt = list(range(1, 31))
    batch = batch_of(*[(prompt, [i]) for i in range(8)])
    assert len(plan_runs(batch, 40, share_prompts=True)) == 1
    assert len(plan_runs(batch, 40, share_prompts=False)) == 8


def test_a_run_larger_than_the_budget_is_cut_and_its_prompt_repeated() -> None:
    batch = batch_of(*[([1, 2, 3], [i] * 5) for i in range(6)])
    plan = plan_runs(batch, 13, share_prompts=True)
    assert sorted(map(sorted, plan)) == [[0, 1], [2, 3], [4, 5]]


def test_an_empty_batch_has_an_empty_plan() -> None:
    batch = random_batch(50).take(torch.zeros(0, dtype=torch.long))
    for share in (True, False):
        assert plan_runs(batch, 100, share_prompts=share) == []
