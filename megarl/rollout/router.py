"""Which engine samples which response. Knows no process: what is asked, answered and lost is told to it.

A group goes, whole, to the engine that owes the fewest tokens: its responses then find their prompt in that engine's cache. What an
engine owed when it was lost waits again, before everything else; an answer counts only for the ask that is open, so that whatever
happens to engines every response is finished once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from megarl.errors import RunError
from megarl.rollout.group import Group
from megarl.rollout.sampling import Answer, Ask


@dataclass(slots=True)
class _Engine:
    room: int  # responses that it samples at one time
    open: dict[int, tuple[Group, int, int]] = field(default_factory=dict)  # key -> group, response, tokens owed
    owed: int = 0  # tokens


class Router:
    """Groups in, asks out; answers in, finished groups out.

    max_new_tokens: of a response, over all its pieces. keys: never the same twice for an engine. seed: of the run.
    """

    def __init__(self, max_new_tokens: int, keys: Iterator[int], seed: int):
        self._budget = max_new_tokens
        self._keys = keys
        self._seed = seed
        self._engines: dict[int, _Engine] = {}
        self._waiting: deque[Group] = deque()
        self._aborted: dict[int, Group] = {}  # by order: came back unfinished, with pieces of it perhaps still open
        self.aborting = False

    # ---- engines

    def join(self, engine: int, room: int) -> None:
        """An engine that can be asked. room: responses it samples at one time."""
        self._engines[engine] = _Engine(max(1, room))

    def lose(self, engine: int) -> int:
        """An engine is gone. What it owed waits again; returns how many responses that is."""
        gone = self._engines.pop(engine, None)
        if gone is None:
            return 0
        groups = {id(group): group for group, _, _ in gone.open.values()}
        self._waiting.extendleft(sorted(groups.values(), key=lambda group: group.order, reverse=True))
        return len(gone.open)

    def knows(self, engine: int) -> bool:
        return engine in self._engines

    def owes(self, engine: int) -> int:
        """Responses that an engine has not answered yet."""
        return len(self._engines[engine].open) if engine in self._engines else 0

    # ---- groups

    def add(self, groups: Iterable[Group]) -> None:
        self._waiting.extend(groups)

    @property
    def unanswered(self) -> int:
        """Groups that wait or are being sampled."""
        return len(self._waiting) + len({id(g) for e in self._engines.values() for g, _, _ in e.open.values()})

    def dispatch(self, engines: Iterable[int]) -> dict[int, list[Ask]]:
        """What to ask those of the engines that have room now, from the groups that wait, in their order."""
        asks: dict[int, list[Ask]] = {number: [] for number in engines if number in self._engines}
        while self._waiting and asks and not self.aborting:
            group = self._waiting[0]
            free = [n for n in asks if self._fits(self._engines[n], len(group.unfinished))]
            if not free:
                break
            number = min(free, key=lambda n: (self._engines[n].owed, n))
            asks[number] += self._open(self._waiting.popleft(), self._engines[number])
        return asks

    def _fits(self, engine: _Engine, responses: int) -> bool:
        return not engine.open or len(engine.open) + responses <= engine.room

    def _open(self, group: Group, engine: _Engine) -> list[Ask]:
        asks = []
        owed = len(group.prompt.token_ids)  # the prompt is read once for all
        for at in group.unfinished:
            begun = group.responses[at].token_ids
            budget = self._budget - len(begun)
            key = next(self._keys)
            asks.append(Ask(key, group.prompt.token_ids, list(begun), budget, group.seed(at, self._seed)))
            engine.open[key] = (group, at, owed + budget)
            engine.owed += owed + budget
            owed = 0
        return asks

    def answered(self, engine: int, answers: Iterable[Answer]) -> list[Group]:
        """Take answers in; the groups that are finished by them. RunError for an answer to nothing that is open there."""
        finished = []
        for answer in answers:
            place = self._engines[engine].open.pop(answer.key, None) if engine in self._engines else None
            if place is None:
                raise RunError(f"rollout engine {engine} answered request {answer.key}, which it was not asked")
            group, at, owed = place
            self._engines[engine].owed -= owed
            group.responses[at].add(answer, self._budget)
            if group.finished:
                self._aborted.pop(group.order, None)
                finished.append(group)
            elif answer.stop_reason == "abort":
                self._aborted[group.order] = group
        return finished

    # ---- the end of a round

    def abort(self) -> None:
        """Hand nothing out any more. `left` are the unfinished groups once every engine has answered or is lost."""
        self.aborting = True

    def left(self) -> list[Group]:
        """The unfinished groups, in order; they are forgotten here. RunError while an engine still owes something."""
        if any(engine.open for engine in self._engines.values()):
            raise RunError("the engines have not all stopped sampling")
        groups = {group.order: group for group in self._waiting} | self._aborted
        self._waiting.clear()
        self._aborted.clear()
        self.aborting = False
        return [groups[order] for order in sorted(groups)]
