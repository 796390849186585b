"""A micro-batch as Megatron sees it: one packed row of tokens (THD), never padded to a rectangle.

With shared prompts the samples of one prompt, lying next to each other, are packed as prompt, response 1, response 2, …: the
prompt is computed once and every response attends to it. With n samples of p prompt and r response tokens that is p + n·r
tokens instead of n·(p + r). It needs a core attention that understands segments with a prefix (the local one does).

The last token of a sequence predicts nothing that is trained on, so it is left out of the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megarl.batch.batch import Batch
from megarl.batch.plan import micro_batches


@dataclass(frozen=True)
class Segment:
    """`length` packed rows from `start`, attending to each other causally and to all of `prefix` (start, length)."""

    start: int
    length: int
    prefix: tuple[int, int] | None = None


@dataclass(frozen=True)
class Packed:
    tokens: torch.Tensor  # (T,) int64
    positions: torch.Tensor  # (T,) int64, from 0 in each sequence
    segments: list[Segment]
    predicts: torch.Tensor  # (R,) the packed row whose hidden state predicts each response token of the micro-batch
    targets: torch.Tensor  # (R,) the response tokens, sample after sample

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, its prefix included."""
        return max(s.length + (s.prefix[1] if s.prefix else 0) for s in self.segments)


def prompt_runs(batch: Batch) -> list[list[int]]:
    """Indices of samples that lie next to each other and have the same prompt ids, in order."""
    tokens = torch.as_tensor(batch["tokens"]).split(batch.total_lengths.tolist())
    prompts = batch.prompt_lengths.tolist()
    runs: list[list[int]] = []
    for i, (row, p) in enumerate(zip(tokens, prompts, strict=True)):
        if runs and prompts[runs[-1][0]] == p and torch.equal(tokens[runs[-1][0]][:p], row[:p]):
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def pack(batch: Batch, *, share_prompts: bool, multiple: int = 1) -> Packed:
    """Pack a micro-batch; the row is filled up to a `multiple` (sequence parallelism) with rows that belong to no segment."""
    rows = torch.as_tensor(batch["tokens"]).split(batch.total_lengths.tolist())
    prompts = batch.prompt_lengths.tolist()
    tokens, positions, segments, predicts, targets = [], [], [], [], []
    end = 0

    def add(ids: torch.Tensor, first: int, prefix: tuple[int, int] | None) -> int:
        nonlocal end
        tokens.append(ids)
        positions.append(torch.arange(first, first + len(ids)))
        segments.append(Segment(end, len(ids), prefix))
        end += len(ids)
        return end - len(ids)

    runs = prompt_runs(batch) if share_prompts else [[i] for i in range(len(batch))]
    for run in runs:
        p = prompts[run[0]]
        if len(run) == 1:
            row = rows[run[0]]
            start = add(row[: max(len(row) - 1, 1)], 0, None)
            predicts.append(torch.arange(start + p - 1, start + len(row) - 1))
            targets.append(row[p:])
            continue
        prompt = (add(rows[run[0]][:p], 0, None), p)
        for i in run:
            response = rows[i][p:]
            targets.append(response)
            if len(response) > 1:
                add(response[:-1], p, prompt)
            if len(response):
                predicts.append(
                    torch.cat([torch.tensor([sum(prompt) - 1]), torch.arange(end - len(response) + 1, end)])
                )
    padding = -end % multiple
    if padding:
        tokens.append(torch.zeros(padding, dtype=torch.long))
        positions.append(torch.zeros(padding, dtype=torch.long))
    empty = [torch.zeros(0, dtype=torch.long)]
    return Packed(
        torch.cat(tokens), torch.cat(positions), segments, torch.cat(predicts or empty), torch.cat(targets or empty)
    )


def plan_runs(batch: Batch, budget: int, *, share_prompts: bool) -> list[list[int]]:
    """Micro-batches of at most `budget` packed tokens (a longer sequence goes alone); samples that share a prompt stay together.

    Returns lists of sample indices; every sample once.
    """
    if not share_prompts:
        return micro_batches(batch.total_lengths.tolist(), budget)
    prompts, responses = batch.prompt_lengths.tolist(), batch.response_lengths.tolist()
    units: list[list[int]] = []
    costs: list[int] = []
    for run in prompt_runs(batch):
        for i in run:
            if i == run[0] or costs[-1] + responses[i] > budget:
                units.append([])
                costs.append(prompts[i])
            units[-1].append(i)
            costs[-1] += responses[i]
    return [[i for u in part for i in units[u]] for part in micro_batches(costs, budget)]
