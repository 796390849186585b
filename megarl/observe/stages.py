"""Where the time goes: one timer, whose stage names are those of the design, the progress display and the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STEP_STAGES = ("rollout", "score", "log_probs", "advantages", "update", "reshard", "log")
OTHER = "other"  # what no stage accounts for

Listener = Callable[["str | None"], None]  # told the stage that runs now; None: none


class Stages:
    """`with stages("rollout"): ...` adds the seconds spent inside to that stage, whatever ends the block.

    A stage inside a stage takes its seconds away from the outer one, so that the stages of a step never sum to more than it.
    Stages that are no part of a step (start-up, evaluation, export) are kept apart, and a step's clock starts with its first
    stage: what happens between two steps is nobody's.
    """

    def __init__(self, listener: Listener | None = None, clock: Callable[[], float] = time.perf_counter):
        self._listener = listener
        self._clock = clock
        self._open: list[str] = []
        self._mark = clock()
        self.seconds: dict[str, float] = {}  # of the step's stages, since the last `collect`
        self.apart: dict[str, float] = {}  # of all others, until they are taken
        self.totals: dict[str, float] = {}  # since the start

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._charge()
        if name in STEP_STAGES and self.seconds.keys() <= {OTHER}:
            self.seconds = {}
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
        """A step's seconds by stage, "other" being those outside all stages: their sum is the step's time. Starts the next."""
        self._charge()
        seconds, self.seconds = self.seconds, {}
        return seconds

    def take(self, name: str) -> float:
        """The seconds since the last time of a stage that is no part of a step."""
        self._charge()
        return self.apart.pop(name, 0.0)

    def _charge(self) -> None:
        now = self._clock()
        name = self._open[-1] if self._open else OTHER
        for record in (self.seconds if name in (*STEP_STAGES, OTHER) else self.apart, self.totals):
            record[name] = record.get(name, 0.0) + now - self._mark
        self._mark = now

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener(self.current)
