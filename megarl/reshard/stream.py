"""All buckets of an update through two places in shared memory, without a word between: who is how far stands in shared memory, too.

A call for each bucket, from the controller over Ray into SGLang's scheduler and back, takes as long as copying 64 MiB does. So ranks
and engines are called once an update, and each goes on when the others' numbers say so: a rank when all engines have let go of what
lies in a place, an engine when all ranks have written theirs. Buckets may be so small that they never leave the processor's cache.
"""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass

from megarl.errors import RunError
from megarl.reshard.bucket import BucketSpec

_PAUSE = 50e-6  # seconds between two looks
_DONE = 1 << 62  # further than any


@dataclass(frozen=True)
class Stream:
    """`buckets` in their order, each with its place. `control`: a file with a number for each of `writers` and `loaders`."""

    control: str
    buckets: list[BucketSpec]
    places: int
    writers: int
    loaders: int
    timeout: float  # seconds that one waits for the others

    def to_json(self) -> dict[str, object]:
        return vars(self) | {"buckets": [bucket.to_json() for bucket in self.buckets]}

    @classmethod
    def from_json(cls, raw: dict[str, object]) -> Stream:
        return cls(**raw | {"buckets": [BucketSpec.from_json(text) for text in raw["buckets"]]})  # type: ignore[attr-defined,arg-type]


class Control:
    """How many buckets each writer has written and each loader has loaded; and whether the update was given up."""

    def __init__(self, stream: Stream):
        """Of a stream whose file `begin` has made."""
        self._stream = stream
        handle = os.open(stream.control, os.O_RDWR)
        try:
            self._numbers = memoryview(mmap.mmap(handle, _size(stream))).cast("q")
        finally:
            os.close(handle)

    @classmethod
    def begin(cls, stream: Stream) -> Control:
        """Make the file, or set all its numbers back."""
        with open(stream.control, "wb") as file:
            file.write(bytes(_size(stream)))
        return cls(stream)

    def wrote(self, writer: int, count: int) -> None:
        self._numbers[1 + writer] = count

    def loaded(self, loader: int, count: int = _DONE) -> None:
        """Without a count: it is gone, and nobody is to wait for it."""
        self._numbers[1 + self._stream.writers + loader] = count

    def holding_up(self) -> list[tuple[int, int]]:
        """Loaders for which everybody waits, with how many buckets they have loaded: less than are written, and none has fewer."""
        first = 1 + self._stream.writers
        written = min(self._numbers[1:first], default=0)
        loaded = list(self._numbers[first:])
        return [(loader, count) for loader, count in enumerate(loaded) if count == min(loaded) < written]

    def abandon(self) -> None:
        """Let everybody who waits, or will, fail."""
        self._numbers[0] = 1

    def wait_written(self, count: int) -> None:
        """Return when all have written so many buckets. RunError when the update was abandoned or nobody goes on."""
        self._wait(1, 1 + self._stream.writers, count)

    def wait_loaded(self, count: int) -> None:
        """Return when all have loaded so many."""
        self._wait(1 + self._stream.writers, len(self._numbers), count)

    def _wait(self, start: int, stop: int, count: int) -> None:
        limit = time.monotonic() + self._stream.timeout
        while min(self._numbers[start:stop], default=_DONE) < count:
            if self._numbers[0]:
                raise RunError("the weight sync was abandoned")
            if time.monotonic() > limit:
                side = "ranks" if start == 1 else "engines"
                raise RunError(f"weight sync: the {side} did not go on within {self._stream.timeout:.0f} s")
            time.sleep(_PAUSE)


def _size(stream: Stream) -> int:
    return 8 * (1 + stream.writers + stream.loaders)
