"""Out of memory in a forward pass or an update, told in one sentence: what was tried on which layout, and what would fit."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path

import torch

from megarl.batch.packing import Packed
from megarl.bridge.activations import Estimate, Layout, MicroBatch

_SIGNS = ("can't allocate memory", "out of memory", "bad_alloc")  # in torch's RuntimeErrors
_GIB = 1 << 30
# Estimates are good to 15 %; what just failed is taken to need at least that much more than there was.
_SURE = 0.85
_RECOMPUTE = ("none", "selective", "full")


def is_shortage(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or in CPU memory."""
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def room() -> int:
    """Bytes that this process can still take: of its GPU, else of the machine's memory and of what it is allowed (RLIMIT_AS)."""
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    available = _kibibytes("/proc/meminfo", "MemAvailable")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        available = min(available, limit - _kibibytes("/proc/self/status", "VmSize"))
    return max(0, available)


def _kibibytes(file: str, name: str) -> int:
    """Bytes of a line `name: NUMBER kB`."""
    (line,) = (line for line in Path(file).read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def sizes(row: Packed, layout: Layout) -> MicroBatch:
    """Of the whole micro-batch that this rank has a piece of."""
    pairs = sum(s.length * (s.length + (s.prefix[1] if s.prefix else 0)) for s in row.segments)
    if (c := layout.context) > 1:  # a rank's two chunks of 2c see 2c + 1 chunks of keys
        pairs = pairs * 4 * c * c // (2 * c + 1)
    responses = row.piece.responses if row.piece else len(row.targets)
    return MicroBatch(len(row.tokens) * c, pairs, responses)


def sentence(what: str, rows: Sequence[Packed], layout: Layout, estimates: dict[str, Estimate], free: int) -> str:
    """What to tell of a shortage. `estimates`: by way of recomputing, of which the present one comes first; `free`: bytes there
    were before the first micro-batch."""
    count, recompute = len(rows), next(iter(estimates))
    fullest = max(
        (sizes(row, layout) for row in rows), key=lambda m: estimates[recompute](m, micro_batches=count).total
    )
    longest = max(row.longest for row in rows)
    needed = estimates[recompute](fullest, micro_batches=count)
    told = (
        f"out of memory in {what}: a micro-batch of {fullest.tokens} tokens (layout: {layout}; recompute={recompute}) needs about "
        f"{needed.total / _GIB:.2f} GiB, {needed.held / _GIB:.2f} of them for activations, and {free / _GIB:.2f} GiB were free"
    )
    usable = round(_SURE * min(free, needed.total))
    for way, estimate in estimates.items():
        fits = estimate.largest(fullest, usable, longest=longest, micro_batches=count)
        if fits is not None:
            with_it = f" with recompute={way}" if way != recompute else ""
            return f"{told}; set micro_batch_tokens={fits} or less{with_it}"
    return (
        f"{told}; not even its longest sequence, of {longest} tokens, would fit alone and computed again: cut the model over more "
        f"ranks (parallel.tensor, pipeline or context), or shorten sequences"
    )


def estimates_of(estimate: Estimate) -> dict[str, Estimate]:
    """By way of recomputing: the present one, and those that keep less."""
    ways = _RECOMPUTE[_RECOMPUTE.index(estimate.recompute) :] if estimate.learns else (estimate.recompute,)
    return {way: estimate.recomputing(way) for way in ways}
