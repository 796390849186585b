"""Sampling on all engines until nothing is left of it: groups go in at any time and come back as they finish."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import ray

from megarl.controller.calls import ProcessLost, wait_for
from megarl.errors import RunError
from megarl.rollout.engine import WAIT, EngineLost
from megarl.rollout.group import Group
from megarl.rollout.router import Router
from megarl.rollout.sampling import Sampling

if TYPE_CHECKING:
    from megarl.controller.engines import EngineGroup, Slot

_LOOK = 5.0  # seconds between two looks at the clocks while nothing happens
_GRACE = 30.0  # seconds in which an actor answers when its engine has used up its own time


class Generation:
    """Iterate over it for the groups as they finish; groups may be added meanwhile. Ends when all are finished.

    An engine that is lost is started anew, and what it owed is asked again, of whoever has room. RunError when that happened too
    often, or when `timeout` seconds have passed since the generation began.
    """

    def __init__(self, engines: EngineGroup, sampling: Sampling, timeout: float):
        self._engines = engines
        self._sampling = sampling
        self._timeout = timeout
        self._begun = time.monotonic()
        self._router = Router(sampling.max_new_tokens, engines.keys, engines.config.run.seed)
        self._calls: dict[Any, tuple[Slot, float]] = {}  # the answer that an engine was last asked for, and since when
        self._finished: deque[Group] = deque()

    def add(self, groups: Iterable[Group]) -> None:
        self._router.add(groups)

    def __len__(self) -> int:
        """Groups that wait, are being sampled, or were not handed over yet."""
        return self._router.unanswered + len(self._finished)

    def __iter__(self) -> Iterator[Group]:
        while self._finished or self._router.unanswered:
            while self._finished:
                yield self._finished.popleft()
            if self._router.unanswered:
                self._turn()

    def abort(self) -> list[Group]:
        """Stop sampling; every group that was not handed over, in order: finished ones, begun ones, untouched ones.

        A response that was begun keeps what it has: added to a later generation, it goes on from there.
        """
        self._router.abort()
        while self._calls or any(self._router.owes(slot.number) for slot in self._engines.slots):
            self._turn()
        groups = [*self._finished, *self._router.left()]
        self._finished.clear()
        return sorted(groups, key=lambda group: group.order)

    def _turn(self) -> None:
        """Ask who can be asked, and take in the next answers."""
        starting = []
        if not self._router.aborting:  # an engine that is not back by then is not needed any more
            self._engines.wake()
            starting = [slot.starting for slot in self._engines.slots if slot.starting is not None]
        self._ask()
        done, _ = ray.wait([*self._calls, *starting], num_returns=1, timeout=_LOOK)
        self._look_at_clocks(done)
        for reference in done:
            if reference in self._calls:
                self._take(reference)

    def _ask(self) -> None:
        busy = {slot.number for slot, _ in self._calls.values()}
        free = [slot for slot in self._engines.slots if slot.current and slot.number not in busy]
        for slot in free:
            if not self._router.knows(slot.number):
                self._router.join(slot.number, slot.info["capacity"])
        asks = self._router.dispatch([slot.number for slot in free])
        for slot in free:
            if asks[slot.number] or self._router.owes(slot.number):
                call = slot.actor.exchange.remote(asks[slot.number], self._sampling, WAIT, self._router.aborting)
                self._calls[call] = (slot, time.monotonic())

    def _take(self, reference: Any) -> None:
        slot, _ = self._calls.pop(reference)
        try:
            (progress,) = wait_for([reference], "rollout", _GRACE, "rollout engine", [slot.number])
        except (EngineLost, ProcessLost) as error:
            self._engines.lose(slot, error, self._router.lose(slot.number))
        else:
            self._finished += self._router.answered(slot.number, progress.answers)

    def _look_at_clocks(self, done: list[Any]) -> None:
        now = time.monotonic()
        for reference, (slot, since) in list(self._calls.items()):
            if reference not in done and now - since > WAIT + self._engines.progress_timeout + _GRACE:
                del self._calls[reference]
                silent = ProcessLost(f"it did not answer within {now - since:.0f} s")
                self._engines.lose(slot, silent, self._router.lose(slot.number))
        if now - self._begun > self._timeout:
            owing = [slot.number for slot in self._engines.slots if self._router.owes(slot.number)]
            raise RunError(
                f"rollout: {self._router.unanswered} groups are not finished after {self._timeout:.0f} s (rollout.timeout); "
                f"they are with rollout engine {', '.join(map(str, owing)) or 'none'}"
            )
