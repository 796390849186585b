"""Where the time goes: one timer, whose stage names are those of the design, the progress display and the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STEP_STAGES = ("rollout", "score", "log_probs", "advantages", "update", "reshard", "log")

Listener = Callable[["str | None"], None]  # told the stage that runs now; None: none


class Stages:
    """`with stages("rollout"): ...` adds the seconds spent inside to that stage, whatever ends the block.

    A stage inside a stage takes its seconds away from the outer one, so that the stages of a step never sum to more than it.
    """

    def __init__(self, listener: Listener | None = None, clock: Callable[[], float] = time.perf_counter):
        self._listener = listener
        self._clock = clock
        self._open: list[str] = []
        self._mark = self._begin = clock()
        self.seconds: dict[str, float] = {}  # since the last `collect`
        self.totals: dict[str, float] = {}  # since the start

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        self._tell()
        try:
            yield
        finally:
            self._charge()
            self._open.pop()
            self._tell()

    @property
    def current(self) -> str | None:
        """The innermost open stage."""
        return self._open[-1] if self._open else None

    def collect(self) -> dict[str, float]:
        """{"time/STAGE": seconds} since the last call, and "time/step", the whole time since then; then start anew."""
        self._charge()
        now = self._mark
        metrics = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        metrics["time/step"] = now - self._begin
        self.seconds, self._begin = {}, now
        return metrics

    def _charge(self) -> None:
        now = self._clock()
        if self._open:
            for record in (self.seconds, self.totals):
                record[self._open[-1]] = record.get(self._open[-1], 0.0) + now - self._mark
        self._mark = now

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener(self.current)
