"""Samples for a step: from the engines, or from a recording of an earlier run."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from megarl.batch import Batch, Prompt
from megarl.config.paths import user_path
from megarl.config.schema import RolloutConfig
from megarl.controller.engines import EngineGroup
from megarl.controller.generation import Generation
from megarl.controller.record import Recorder, read_steps
from megarl.errors import RunError
from megarl.rollout.group import Group, begin
from megarl.rollout.sampling import Sampling


class Rollout(Protocol):
    def collect(self, prompts: Sequence[Prompt], step: int) -> Batch:
        """The samples of one step, a prompt's samples next to each other."""

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """What a later process needs to go on with the next step; plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class GroupSelection:
    """Which groups make a step, and when they are looked at.

    score: what a finished group earns, as fields of the samples; called while others are still sampled.
    keep: whether a finished, scored group counts (the dynamic filter of DAPO, arXiv:2503.14476, sec. 3.2, keeps those whose rewards
    differ); further prompts are asked for until as many groups counted as the step has prompts.
    more: further prompts, when the step's own are used up.
    oversample: so many times the groups that are still wanted are being sampled; with the last one wanted the rest is stopped.
    unfinished: what was stopped is dropped, or kept: it goes on in the next step, before new prompts, and groups that were
    finished but not wanted count there. Such a response has tokens of several weight versions.
    limit: times a step's prompts that may be begun in one step.
    """

    score: Callable[[Batch], Batch] | None = None
    keep: Callable[[Batch], bool] | None = None
    more: Callable[[int], Sequence[Prompt]] | None = None
    oversample: float = 1.0
    unfinished: Literal["drop", "keep"] = "drop"
    limit: float = 10.0


@dataclass
class _Counted:
    """A group that makes part of a step."""

    group: Group
    batch: Batch  # its samples, scored where the filter wants that


@dataclass
class _Step:
    """One step's sampling. `asked` are groups that were begun in it."""

    number: int
    wanted: int
    counted: list[_Counted] = field(default_factory=list)
    asked: int = 0
    resumed: int = 0
    rejected: int = 0
    left: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def missing(self) -> int:
        return self.wanted - len(self.counted)


class Generated:
    """Samples from the engines, written to a recording where one is asked for.

    A batch's meta has under "rollout" how many groups were asked, resumed, rejected by the filter and left unfinished, and how many
    engines were lost.
    """

    def __init__(
        self,
        engines: EngineGroup,
        config: RolloutConfig,
        *,
        selection: GroupSelection = GroupSelection(),
        min_p: float = 0.0,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        recorded: int = 0,
    ):
        """`recorded`: steps whose record, which an interrupted run has written, stays."""
        self._engines = engines
        self._selection = selection
        self._sampling = Sampling(
            n=config.n,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=min_p,
            max_new_tokens=config.max_new_tokens,
            stop=tuple(stop),
            stop_token_ids=tuple(stop_token_ids),
        )
        self._recorder = Recorder(user_path(config.record), recorded) if config.record else None
        self._resumed: deque[Group] = deque()
        self._new: deque[Group] = deque()
        self._over: list[_Counted] = []  # counted in an earlier step, and not wanted there any more
        self._begun = self._steps = 0

    def collect(self, prompts: Sequence[Prompt], step: int) -> Batch:
        """As many groups as there are prompts, in the order in which they were begun."""
        state = _Step(step, len(prompts))
        self._steps += 1
        self._begin(prompts, state)
        state.counted, self._over = self._over[: state.wanted], self._over[state.wanted :]
        if state.missing:
            generation = self._engines.sample(self._sampling)
            self._top_up(generation, state)
            for group in generation:
                self._judge(group, state)
                if state.missing <= 0:
                    break
                self._top_up(generation, state)
            self._put_away(generation.abort(), state)
        self._over += state.counted[state.wanted :]
        return self._batch(sorted(state.counted[: state.wanted], key=lambda counted: counted.group.order), state)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "resumed": [group.state_dict() for group in self._resumed],
            "new": [group.state_dict() for group in self._new],
            "over": [counted.group.state_dict() for counted in self._over],
            "begun": self._begun,
            "steps": self._steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._begun = state["steps"], state.get("begun", 0)  # a run that was replayed has begun none
        self._over = []
        for name, queue in (("resumed", self._resumed), ("new", self._new)):
            queue.clear()
            queue.extend(self._came_back(group) for group in state.get(name, ()))
        for group in map(self._came_back, state.get("over", ())):
            if group.finished:
                self._over.append(self._counted(group))
            else:
                self._resumed.append(group)

    def _came_back(self, state: Mapping[str, Any]) -> Group:
        """A group of a checkpoint; `rollout.n` may have been another."""
        group = Group.of(state)
        group.resize(self._sampling.n)
        return group

    def _counted(self, group: Group) -> _Counted:
        batch = Batch.from_samples(group.samples())
        if self._selection.score is not None:
            batch = batch.union(self._selection.score(batch))
        return _Counted(group, batch)

    def _begin(self, prompts: Sequence[Prompt], state: _Step) -> None:
        groups = begin(prompts, self._sampling.n, f"@{state.number}", self._begun, state.seen)
        self._new += groups
        self._begun += len(groups)

    def _top_up(self, generation: Generation, state: _Step) -> None:
        """Let as many groups be sampled as are wanted, oversampled."""
        lacking = math.ceil(state.missing * self._selection.oversample) - len(generation)
        for _ in range(lacking):
            if self._resumed:
                generation.add([self._resumed.popleft()])
                state.resumed += 1
                continue
            if not self._new and not self._ask_more(generation, state):
                return
            generation.add([self._new.popleft()])
            state.asked += 1

    def _ask_more(self, generation: Generation, state: _Step) -> bool:
        """Take further prompts where that is possible. RunError where it is not, and the step cannot be filled without."""
        full = state.asked >= self._selection.limit * state.wanted
        if self._selection.more is None or full:
            if len(generation) < state.missing:
                why = "rollout.filter_limit allows no more" if full else "there are no more prompts"
                raise RunError(
                    f"step {state.number}: {state.asked + state.resumed} groups were sampled and {len(state.counted)} of "
                    f"{state.wanted} passed the filter; {why}"
                )
            return False
        self._begin(self._selection.more(1), state)
        return bool(self._new)

    def _judge(self, group: Group, state: _Step) -> None:
        counted = self._counted(group)
        if self._selection.keep is None or self._selection.keep(counted.batch):
            state.counted.append(counted)
        else:
            state.rejected += 1

    def _put_away(self, groups: Sequence[Group], state: _Step) -> None:
        """What is left when a step has enough. Nothing is lost of a group that was not begun yet."""
        for group in reversed(groups):
            state.left += not group.finished
            if not any(response.token_ids for response in group.responses):
                self._new.appendleft(group)
            elif self._selection.unfinished == "keep" and group.finished:
                self._judge(group, state)
            elif self._selection.unfinished == "keep":
                self._resumed.appendleft(group)

    def _batch(self, counted: Sequence[_Counted], state: _Step) -> Batch:
        if self._recorder is not None:
            self._recorder.add(state.number, [sample for one in counted for sample in one.group.samples()])
        batch = Batch.concat([one.batch for one in counted]) if counted else Batch.from_samples([])
        batch.meta["rollout"] = {
            "asked": state.asked,
            "resumed": state.resumed,
            "rejected": state.rejected,
            "unfinished": state.left,
            "restarts": self._engines.restarts,
        }
        return batch


class Replayed:
    """Samples of an earlier run, step by step, in place of generation."""

    def __init__(self, path: Path):
        self._path = path
        self._recorded = read_steps(path)
        self._steps = 0

    def collect(self, prompts: Sequence[Prompt], step: int) -> Batch:
        samples = next(self._recorded, None)
        if samples is None:
            raise RunError(f"rollout.replay: {self._path} holds no samples for step {step}; record a longer run")
        self._steps += 1
        return Batch.from_samples(samples)

    def close(self) -> None:
        self._recorded.close()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]
        for _ in range(self._steps):
            next(self._recorded, None)
