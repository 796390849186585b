"""A micro-batch as Megatron sees it: one packed row of tokens (THD), never padded to a rectangle.

With shared prompts the samples of one prompt, lying next to each other, are packed as prompt, response 1, response 2, …: the
prompt is computed once and every response attends to it. With n samples of p prompt and r response tokens that is p + n·r
tokens instead of n·(p + r). It needs a core attention that understands segments with a prefix (the local one does).

The last token of a sequence predicts nothing that is trained on, so it is left out of the row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from megarl.batch.batch import Batch
from megarl.batch.plan import micro_batches


@dataclass(frozen=True)
class Segment:
    """`length` packed rows from `start`, attending to each other causally and to all of `prefix` (start, length).

    `keys`: where these rows and the prefix lie among the keys, if keys are not numbered as queries are (context parallelism).
    """

    start: int
    length: int
    prefix: tuple[int, int] | None = None
    keys: int | None = None


@dataclass(frozen=True)
class Piece:
    """What a rank of context parallelism holds of a packed row."""

    rows: torch.Tensor  # (ranks, T) int64, for every rank: where its rows lie in the whole one
    bounds: list[int]  # of the whole one: where each sequence starts, and the end
    slots: torch.Tensor  # (R here,) which of the micro-batch's response tokens are predicted here
    responses: int  # how many there are


@dataclass(frozen=True)
class Packed:
    tokens: torch.Tensor  # (T,) int64
    positions: torch.Tensor  # (T,) int64, from 0 in each sequence
    segments: list[Segment]
    predicts: torch.Tensor  # (R,) the packed row whose hidden state predicts each response token of the micro-batch
    targets: torch.Tensor  # (R,) the response tokens, sample after sample
    real: torch.Tensor  # (T,) bool, False at padding
    piece: Piece | None = None  # None: this is the whole row

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, its prefix included."""
        return max(s.length + (s.prefix[1] if s.prefix else 0) for s in self.segments)


class _Row:
    """A packed row that grows."""

    def __init__(self) -> None:
        self.end = 0
        self.segments: list[Segment] = []
        self._tokens: list[torch.Tensor] = []
        self._positions: list[torch.Tensor] = []
        self._real: list[torch.Tensor] = []

    def add(self, ids: torch.Tensor, first: int, prefix: tuple[int, int] | None = None, *, padding: int = 0) -> int:
        """A segment of `ids` at the positions from `first`, with `padding` behind; answers where it starts."""
        start, length = self.end, len(ids) + padding
        self._fill(ids, torch.arange(first, first + length), padding)
        self.segments.append(Segment(start, length, prefix))
        return start

    def fill(self, padding: int, *, last: bool) -> None:
        """Padding at the end: of the `last` segment, or of none."""
        positions = torch.zeros(padding, dtype=torch.long)
        if last:
            segment = self.segments.pop()
            positions += torch.arange(segment.length, segment.length + padding)
            self.segments.append(replace(segment, length=segment.length + padding))
        self._fill(torch.zeros(0, dtype=torch.long), positions, padding)

    def _fill(self, ids: torch.Tensor, positions: torch.Tensor, padding: int) -> None:
        self._tokens += [ids, torch.zeros(padding, dtype=torch.long)]
        self._real += [torch.ones(len(ids), dtype=torch.bool), torch.zeros(padding, dtype=torch.bool)]
        self._positions.append(positions)
        self.end += len(ids) + padding

    def packed(self, predicts: list[torch.Tensor], targets: list[torch.Tensor]) -> Packed:
        empty = [torch.zeros(0, dtype=torch.long)]
        row = (torch.cat(self._tokens), torch.cat(self._positions), self.segments)
        return Packed(*row, torch.cat(predicts or empty), torch.cat(targets or empty), torch.cat(self._real))


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


def pack(batch: Batch, *, share_prompts: bool, multiple: int = 1, context: int = 1) -> Packed:
    """Pack a micro-batch; the row is filled up to a `multiple` (sequence parallelism) with rows that belong to no segment.

    For `context` ranks, between which sequences are cut: each is filled up to a multiple of 2·context, and the last one on, until
    every rank's piece is a `multiple`. Prompts are not shared then.
    A micro-batch without samples is one segment of padding that predicts nothing.
    """
    rows = torch.as_tensor(batch["tokens"]).split(batch.total_lengths.tolist())
    prompts = batch.prompt_lengths.tolist()
    unit = 2 * context if context > 1 else 1
    row, predicts, targets = _Row(), [], []
    runs = prompt_runs(batch) if share_prompts and context == 1 else [[i] for i in range(len(batch))]
    for run in runs:
        p = prompts[run[0]]
        if len(run) == 1:
            ids = rows[run[0]]
            seen = ids[: max(len(ids) - 1, 1)]
            start = row.add(seen, 0, padding=-len(seen) % unit)
            predicts.append(torch.arange(start + p - 1, start + len(ids) - 1))
            targets.append(ids[p:])
            continue
        prompt = (row.add(rows[run[0]][:p], 0), p)
        for i in run:
            response = rows[i][p:]
            targets.append(response)
            if len(response) > 1:
                row.add(response[:-1], p, prompt)
            if len(response):
                inner = torch.arange(row.end - len(response) + 1, row.end)
                predicts.append(torch.cat([torch.tensor([sum(prompt) - 1]), inner]))
    if not len(batch):
        row.add(torch.zeros(0, dtype=torch.long), 0, padding=unit)
    row.fill(-row.end % math.lcm(unit, multiple * context), last=context > 1)
    return row.packed(predicts, targets)


def cut(packed: Packed, rank: int, ranks: int) -> Packed:
    """The piece of a row (packed for as many `ranks`) that lies on `rank` of context parallelism.

    Every sequence is cut into 2·ranks chunks, of which rank r gets chunks r and 2·ranks - 1 - r (zig-zag): under a causal mask
    an early chunk sees little and a late one much, and each rank's two add up to the same work. A chunk attends to itself
    and to all chunks of its sequence before it: it is a segment with a prefix. Transformer Engine deals sequences out alike.
    Predictions stay with the row that makes them, so targets are those of the whole sequence, at the chunks' borders too.
    """
    pieces: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    segments: list[Segment] = []
    for sequence in packed.segments:
        size = sequence.length // (2 * ranks)
        for r in range(ranks):
            for chunk in (r, 2 * ranks - 1 - r):
                start = sequence.start + chunk * size
                if r == rank:
                    here = sum(len(rows) for rows in pieces[r])
                    prefix = (sequence.start, chunk * size) if chunk else None
                    segments.append(Segment(here, size, prefix, start))
                pieces[r].append(torch.arange(start, start + size))
    rows = torch.stack([torch.cat(piece) for piece in pieces])
    place = torch.full((len(packed.tokens),), -1)
    place[rows[rank]] = torch.arange(rows.shape[1])
    predicts = place[packed.predicts]
    slots = (predicts >= 0).nonzero()[:, 0]
    bounds = [*(s.start for s in packed.segments), len(packed.tokens)]
    return Packed(
        packed.tokens[rows[rank]],
        packed.positions[rows[rank]],
        segments,
        predicts[slots],
        packed.targets[slots],
        packed.real[rows[rank]],
        Piece(rows, bounds, slots, len(packed.targets)),
    )


def plan_runs(batch: Batch, budget: int, *, share_prompts: bool, at_least: int = 1) -> list[list[int]]:
    """Micro-batches of at most `budget` packed tokens (a longer sequence goes alone); samples that share a prompt stay together.

    Returns lists of sample indices; every sample once; `at_least` so many lists as far as that can be.
    """
    if not share_prompts:
        return micro_batches(batch.total_lengths.tolist(), budget, at_least=at_least)
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
    return [[i for u in part for i in units[u]] for part in micro_batches(costs, budget, at_least=at_least)]


def shares(
    batch: Batch, ranks: int, *, pair_cost: float = 0.0, share_prompts: bool = True, tolerance: float = 0.01
) -> list[list[int]]:
    """Sample indices for each of `ranks` data-parallel ranks, of costs as equal as may be; every sample once.

    Cost of a sequence: its rows, and `pair_cost` for every pair of a row and one that it sees, n + pair_cost · n(n+1)/2 for n
    rows. With shared prompts the prompt of neighbours counts once, and they stay together unless the costliest rank would then
    have more than `tolerance` above the mean: then the costliest runs are halved until it has not, or nothing is left to halve.
    """
    runs = prompt_runs(batch) if share_prompts else [[i] for i in range(len(batch))]
    p, r = batch.prompt_lengths.double(), batch.response_lengths.double()
    prompt = (p + pair_cost * p * (p + 1) / 2).tolist()
    response = (r + pair_cost * (p * r + r * (r + 1) / 2)).tolist()
    units = [(run[0], run) for run in runs]  # the sample that stands for the prompt, the samples
    best: list[list[int]] = []
    least = math.inf
    while True:
        sizes = [sum(response[i] for i in unit) for _, unit in units]
        parts, loads = _dealt(units, sizes, prompt, ranks)
        excess = float(loads.max() / (loads.mean() or 1)) - 1
        if excess < least:
            best, least = parts, excess
        divisible = sorted((u for u, (_, unit) in enumerate(units) if len(unit) > 1), key=lambda u: -sizes[u])
        if least <= tolerance or not divisible:
            return best
        costliest = set(divisible[: -(-len(divisible) // 4)])
        units = [
            (of, part) for u, (of, unit) in enumerate(units) for part in (_halves(unit) if u in costliest else [unit])
        ]


def _dealt(
    units: list[tuple[int, list[int]]], sizes: list[float], prompt: list[float], ranks: int
) -> tuple[list[list[int]], torch.Tensor]:
    """The costliest unit first, each to the rank that has least then; a rank that has the prompt already is spared it."""
    loads = torch.zeros(ranks, dtype=torch.float64)
    parts: list[list[int]] = [[] for _ in range(ranks)]
    holders: dict[int, list[int]] = {}
    for u in sorted(range(len(units)), key=lambda u: (-sizes[u] - prompt[units[u][0]], u)):
        of, unit = units[u]
        held = holders.setdefault(of, [])
        new = loads + (sizes[u] + prompt[of])
        new[held] -= prompt[of]
        rank = int(new.argmin())
        loads[rank] = new[rank]
        parts[rank] += unit
        holders[of] = [*held, rank] if rank not in held else held
    return [sorted(part) for part in parts], loads


def _halves(run: list[int]) -> list[list[int]]:
    middle = len(run) // 2
    return [run[:middle], run[middle:]]
