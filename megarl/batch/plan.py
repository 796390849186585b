"""How a batch is cut: into micro-batches under a token budget, and over data-parallel ranks by cost. Deterministic."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], budget_tokens: int, *, at_least: int = 1) -> list[list[int]]:
    """Indices of the sequences of each micro-batch: every index once, at most `budget_tokens` tokens each.

    A sequence longer than the budget goes alone. Sequences of similar length stand together, so that attention which
    pads within a micro-batch wastes little, unless packing them crosswise takes fewer micro-batches. The longest come
    first, so that memory peaks at once or never. `at_least` asks for more micro-batches (a pipeline to fill) as far as
    there are sequences.
    Raises ValueError on a negative length or a budget below 1.
    """
    if budget_tokens < 1:
        raise ValueError(f"micro_batches: the budget of {budget_tokens} tokens is below 1")
    if not lengths:
        return []
    if min(lengths) < 0:
        raise ValueError("micro_batches: a length is negative")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = len(_runs(order, lengths, budget_tokens))
    packed = _best_fit(order, lengths, budget_tokens)
    if at_least <= len(packed) < count:
        return _evened(packed, lengths, budget_tokens)
    count = max(count, min(at_least, len(order)))
    return _split_largest(_runs(order, lengths, _least_capacity(order, lengths, budget_tokens, count)), lengths, count)


def balance(costs: Sequence[float], k: int, equal_counts: bool = False) -> list[list[int]]:
    """k lists of indices with costs as equal as may be; some are empty where there are fewer items than k.

    The costliest item goes to the cheapest list that still has room (longest processing time first; without
    `equal_counts` the largest list is at most 4/3 of the best possible). `equal_counts`: sizes differ by at most one,
    for ranks that must take the same number of steps. Indices rise within a list. Raises ValueError on k < 1.
    """
    if k < 1:
        raise ValueError(f"balance: cannot share among {k}")
    size, larger = divmod(len(costs), k) if equal_counts else (len(costs), 0)
    parts: list[list[int]] = [[] for _ in range(k)]
    loads = [(0.0, part) for part in range(k)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, part = heapq.heappop(loads)
        while len(parts[part]) == size and larger == 0:  # full for good: never looked at again
            load, part = heapq.heappop(loads)
        larger -= len(parts[part]) == size
        parts[part].append(item)
        if len(parts[part]) <= size:
            heapq.heappush(loads, (load + costs[item], part))
    return [sorted(part) for part in parts]


def _runs(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Cut `order` into runs, each as long as fits."""
    runs: list[list[int]] = []
    room = -1
    for i in order:
        if not runs or lengths[i] > room:
            runs.append([])
            room = capacity
        runs[-1].append(i)
        room -= lengths[i]
    return runs


def _least_capacity(order: Sequence[int], lengths: Sequence[int], budget: int, count: int) -> int:
    """The smallest capacity that still needs at most `count` runs: the evenest cut."""
    low, high = max(1, -(-sum(lengths) // count)), budget
    while low < high:
        middle = (low + high) // 2
        if len(_runs(order, lengths, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return high


def _split_largest(runs: list[list[int]], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Halve the fullest run that can be halved until there are `count`."""
    while len(runs) < count:
        at = max((r for r in range(len(runs)) if len(runs[r]) > 1), key=lambda r: sum(lengths[i] for i in runs[r]))
        middle = len(runs[at]) // 2
        runs[at : at + 1] = [runs[at][:middle], runs[at][middle:]]
    return runs


def _best_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Best-fit decreasing: each sequence into the fullest bin that still has room for it."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), sorted
    for i in order:
        at = bisect_left(rooms, (lengths[i], -1))
        if at < len(rooms):
            room, chosen = rooms.pop(at)
        else:
            room, chosen = budget, len(bins)
            bins.append([])
        bins[chosen].append(i)
        insort(rooms, (room - lengths[i], chosen))
    return bins


def _evened(bins: list[list[int]], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """The same number of bins filled evenly where that fits, else the bins as they are."""
    parts = [sorted(part, key=lambda i: (-lengths[i], i)) for part in balance(lengths, len(bins))]
    if any(sum(lengths[i] for i in part) > budget and len(part) > 1 for part in parts):
        return bins
    return sorted(parts, key=lambda part: (-lengths[part[0]], part[0]))
