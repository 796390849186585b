"""How far a long walk over bytes is: a line that moves in a terminal, one now and then elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Self, TextIO

from megarl.observe.progress import clock

MOVES, STAYS = 0.2, 10.0  # seconds between lines, in a terminal and elsewhere


def tell(text: str) -> None:
    """A line on stderr, be it read or not."""
    if sys.stderr is not None:  # it is where the shell has closed it
        with suppress(OSError):
            print(text, file=sys.stderr)


class ByteProgress:
    """`done` of `total` bytes, their rate and the time that the rest will take, on stderr; nothing where `show` is False."""

    def __init__(self, what: str, total: int, *, show: bool = True, out: TextIO | None = None):
        self._what, self._total = what, max(1, total)
        self._out: TextIO | None = out or sys.stderr  # None: the shell has closed it
        self._show = show and self._out is not None
        self._moves = self._out is not None and self._out.isatty()
        self._begin = self._last = time.monotonic()
        self._width = 0
        self.done = 0

    def add(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if self._show and now - self._last >= (MOVES if self._moves else STAYS):
            self._last = now
            self._print(self.line(now))

    def line(self, now: float) -> str:
        """`converting: 1.2 of 4.9 GB, 0.87 GB/s, 0:04 left`"""
        spent = max(now - self._begin, 1e-9)
        rate = self.done / spent
        left = clock((self._total - self.done) / rate) if self.done else "?"
        return f"{self._what}: {self.done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s, {left} left"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._moves and self._width:
            self._print("", "\r")

    def _print(self, text: str, end: str = "") -> None:
        assert self._out is not None
        with suppress(OSError):  # nobody reads it, or no disk takes it: no reason to stop
            if self._moves:
                self._out.write("\r" + text.ljust(self._width) + end)
                self._width = max(self._width, len(text))
            else:
                self._out.write(text + "\n")
            self._out.flush()
