"""Whether what an engine answers can be right, and whether it gets on at all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from megarl.rollout.sampling import Answer, Ask, Progress

_ROUNDING = 1e-3  # a log-prob above 0 by so much is still rounding


class Open:
    """The asks that an engine has not answered. `add` before an exchange, `take` after it."""

    def __init__(self, vocabulary: int, progress_timeout: float, clock: Callable[[], float] = time.monotonic):
        self._vocabulary = vocabulary
        self._timeout = progress_timeout
        self._clock = clock
        self._asks: dict[int, Ask] = {}
        self._tokens = 0
        self._moved = clock()  # when there last was progress, or nothing to do

    def add(self, asks: Sequence[Ask]) -> None:
        if asks and not self._asks:
            self._moved = self._clock()
        self._asks |= {ask.key: ask for ask in asks}

    def forget(self, asks: Sequence[Ask]) -> None:
        """They were refused."""
        for ask in asks:
            self._asks.pop(ask.key, None)

    def take(self, progress: Progress, *, stopping: bool = False) -> str | None:
        """Close what was answered. What is wrong, as the end of a sentence about the engine; None where nothing is."""
        for answer in progress.answers:
            ask = self._asks.pop(answer.key, None)
            if ask is None:
                return f"answered garbage: request {answer.key} was not asked, or was answered before"
            if fault := _fault(ask, answer, self._vocabulary, stopping):
                return f"answered garbage: {fault}"
        now = self._clock()
        if progress.answers or progress.tokens != self._tokens or not self._asks:
            self._tokens, self._moved = progress.tokens, now
        elif now - self._moved > self._timeout:
            return f"hangs: no token of {len(self._asks)} responses in {now - self._moved:.0f} s"
        return None


def _fault(ask: Ask, answer: Answer, vocabulary: int, stopping: bool) -> str | None:
    ids, log_probs = answer.token_ids, answer.log_probs
    if answer.stop_reason not in ("stop", "length", "abort"):
        return f"a response ended with {answer.stop_reason!r}"
    if len(ids) != len(log_probs):
        return f"a response has {len(ids)} tokens and {len(log_probs)} log-probs"
    if len(ids) > ask.budget:
        return f"a response has {len(ids)} tokens where {ask.budget} were asked for at most"
    if answer.stop_reason == "abort" and not stopping:
        return "a response ended before it was done, and nobody had stopped it"
    if not ids and answer.stop_reason != "abort" and not ask.begun_ids:
        return "a response has no tokens"
    if ids and not (0 <= min(ids) and max(ids) < vocabulary):
        return f"a response has the token {max(ids)}, and the model has {vocabulary}"
    for value in log_probs:
        if not math.isfinite(value) or value > _ROUNDING:
            return f"a response has the log-prob {value}"
    return None
