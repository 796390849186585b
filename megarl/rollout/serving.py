"""What every engine does behind its calls, wherever SGLang runs: it samples with weights of one version, or says why it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from megarl.errors import RunError
from megarl.rollout.requests import Requests
from megarl.rollout.sampling import Ask, Progress, Sampling

T = TypeVar("T")


class Serving:
    """Sampling and scoring; a weight update is begun and ended around them, and its loading is the subclass's."""

    requests: Requests
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self.version = 0
        self.updating: int | None = None  # the version that is being loaded
        self.broken = ""  # why the weights can not be trusted
        self.released: set[str] = set()  # what has no memory now: weights, cache
        self.fingerprints: dict[str, int] = {}
        self.seconds = {"load": 0.0, "prove": 0.0}  # of the last update

    def state(self) -> dict[str, Any]:
        return {
            "weight_version": self.version,
            "updating": self.updating is not None,
            "sampling": len(self.requests),
            "update_seconds": self.seconds,
        }

    def exchange(self, asks: list[Ask], sampling: Sampling, wait: float, stop: bool) -> Progress:
        """Begin `asks`; then what has been answered, waited for up to `wait` seconds. stop: end all requests first."""
        return self._run(self._exchange(asks, sampling, wait, stop))

    async def _exchange(self, asks: list[Ask], sampling: Sampling, wait: float, stop: bool) -> Progress:
        if asks:
            self._check_weights()
            self.requests.check(asks)
            await self.requests.begin(asks, sampling, self.version)
        if stop:
            await self.requests.stop()
        answers = await self.requests.collect(wait)
        return Progress(answers, await self.requests.tokens())

    def score(self, token_ids: list[list[int]]) -> list[list[float]]:
        """Log-probs (temperature 1) of every token but the first, given those before it."""
        self._check_weights()
        return self._run(self.requests.score(token_ids))

    def begin_update(self, version: int) -> None:
        if len(self.requests):
            raise RunError(f"{len(self.requests)} responses are still being sampled")
        if self.updating is not None:
            raise RunError(f"the update to weight version {self.updating} is already open")
        self._open_update()
        self.updating, self.broken, self.fingerprints = version, "", {}
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def _open_update(self) -> None:
        """Raises RunError where an update cannot begin; nothing has changed then."""

    def _check_weights(self) -> None:
        if self.updating is not None:
            raise RunError(f"the update to weight version {self.updating} has not ended")
        if self.released:
            raise RunError(f"the memory of its {' and '.join(sorted(self.released))} is released")
        if self.broken:
            raise RunError(f"its weights are not to be trusted: {self.broken}")

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)
