"""All rollout engines as one object: prompts go out, samples come back; weights go in; an engine that is lost is started anew."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from megarl import cpu
from megarl.batch import Prompt, Sample
from megarl.config import Config
from megarl.controller.calls import ProcessLost, wait_for
from megarl.controller.generation import Generation
from megarl.controller.placement import Place, on_gpus, places_of
from megarl.controller.sizes import cache_tokens
from megarl.controller.workers import interface
from megarl.errors import RunError
from megarl.reshard.bucket import BucketSpec, BucketTensor
from megarl.reshard.exposure import Exposure
from megarl.reshard.link import Meeting, Regions
from megarl.reshard.stream import Control, Stream
from megarl.reshard.transfer import Member, Receivers
from megarl.rollout.engine import Engine, EngineLost
from megarl.rollout.group import begin
from megarl.rollout.remote import RemoteEngine
from megarl.rollout.sampling import Sampling

NAME = "rollout engine"
LOST = (EngineLost, ProcessLost)
RELEASED = {"off": (), "cache": ("cache",), "all": ("cache", "weights")}  # by rollout.release_memory


@dataclass
class Slot:
    """The place of one engine; who sits there may change."""

    number: int
    actor: Any = None
    starting: Any = None  # the answer of one that is being started
    begun: float = 0.0
    starts: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    current: bool = False  # has the weights that all have
    released: set[str] = field(default_factory=set)  # memory that it gave back: weights, cache

    @property
    def member(self) -> Member:
        """Who sits here now: of those that take part in an update."""
        return self.number, self.starts


class EngineGroup:
    """The rollout engines, each a Ray actor in its own process, started side by side; or servers that run already (rollout.urls), each
    spoken to by an actor, which nobody can start anew.

    engines: how many, where there are no servers. max_restarts: engines that may be lost between two weight updates; 0, as it is with
    servers: the first loss ends the run.
    progress_timeout: seconds without a token after which an engine is taken for hung. note: told of every restart.
    oversample: so many times a step's groups are sampled at one time; sizes the cache on CPU. places: where engines are put; None: Ray
    is asked for them.

    renew: gives one engine the weights that all others have; set by who owns the weights, before anything is lost.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        engines: int = 1,
        max_restarts: int = 0,
        progress_timeout: float = 300.0,
        oversample: float = 1.0,
        note: Callable[[str], None] = lambda _: None,
        places: Sequence[Place] | None = None,
    ):
        self.config = config
        self._urls = config.rollout.urls
        engines = len(self._urls) or engines
        self.max_restarts = 0 if self._urls else max_restarts
        self.progress_timeout = progress_timeout
        self.renew: Callable[[Receivers], None] | None = None
        self.restarts = 0  # since the last weight update
        self.keys = itertools.count()
        self._note = note
        self._folder = str(folder)
        r = config.rollout
        self._threads = r.threads or max(1, (os.cpu_count() or 1) // engines)
        self._cache = r.max_total_tokens or self._cache_tokens(engines, oversample)
        self.size = int(r.engine.get("tp_size", 1))  # ranks of an engine
        self._places = places or places_of(replace(config, rollout=replace(r, engines=engines))).engines
        self.slots = [Slot(number) for number in range(engines)]
        self._updating: list[Slot] = []
        for slot in self.slots:
            self._start(slot)

    def _start(self, slot: Slot) -> None:
        r = self.config.rollout
        # no two engines that ever run draw the same numbers
        seed = self.config.run.seed + slot.number + len(self.slots) * slot.starts
        options, environment = self._place(slot.number)
        actor = ray.remote(RemoteEngine if self._urls else Engine)
        actor = actor.options(runtime_env={"env_vars": environment}, max_concurrency=1, **options)
        if self._urls:
            slot.actor = actor.remote(
                self._urls[slot.number], self._folder, seed=seed, progress_timeout=self.progress_timeout
            )
        else:
            slot.actor = actor.remote(
                self._folder,
                dtype=r.dtype or self.config.model.dtype,
                threads=self._threads,
                max_total_tokens=self._cache,
                seed=seed,
                extra=dict(r.engine),
                start_timeout=r.start_timeout,
                progress_timeout=self.progress_timeout,
                releases=r.release_memory != "off",
                deterministic=r.deterministic,
                quantised=r.quantization is not None,
            )
        slot.starts += 1
        slot.released = set()
        slot.starting, slot.begun, slot.current = slot.actor.ready.remote(), time.monotonic(), False

    def _place(self, number: int) -> tuple[dict[str, Any], dict[str, str]]:
        """What Ray is asked for an engine, and its environment."""
        environment = cpu.process_env(self._threads) | interface(self.config.cluster)
        if self._urls:  # an actor that speaks to a server computes nothing
            return {"num_cpus": 0}, environment
        return self._places[number].options, environment | self._places[number].environment

    def ready(self) -> None:
        """Wait until all have started, with the folder's weights."""
        starting = [slot.starting for slot in self.slots]
        infos = wait_for(starting, "starting the rollout engine", self.config.rollout.start_timeout, NAME)
        for slot, info in zip(self.slots, infos, strict=True):
            slot.info, slot.starting, slot.current = info, None, True

    # ---- sampling

    def sample(self, sampling: Sampling) -> Generation:
        """Begin to sample; one at a time. Groups are added to it and come back as they finish."""
        return Generation(self, sampling, self.config.rollout.timeout)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, group_suffix: str) -> list[Sample]:
        """`sampling.n` samples of every prompt, a prompt's samples next to each other, in the prompts' order."""
        groups = begin(prompts, sampling.n, group_suffix)
        generation = self.sample(sampling)
        generation.add(groups)
        for _ in generation:
            pass
        return [sample for group in groups for sample in group.samples()]

    def score(self, token_ids: list[list[int]]) -> list[list[list[float]]]:
        """Each engine's log-probs of given tokens at temperature 1, from the second token of each sequence on."""
        answers: dict[int, Any] = {}
        while missing := [slot for slot in self.slots if slot.number not in answers]:
            self._settle()
            answers |= self._each(missing, "score", "engine log-probs", token_ids)
        return [answers[slot.number] for slot in self.slots]

    # ---- memory

    def release(self) -> None:
        """Nothing is sampled until the next weights: give memory back, as far as rollout.release_memory says."""
        what = RELEASED[self.config.rollout.release_memory]
        if not what:
            return
        running = self._running()
        released = self._each(running, "release_memory", "giving memory back", what)
        for slot in running:
            if slot.number in released:
                slot.released.update(what)

    def resume(self, what: str) -> None:
        """Take memory of "weights", which the next update fills, or of the "cache" again, where it was released."""
        slots = [slot for slot in self.slots if what in slot.released]
        self._each(slots, "resume_memory", "taking memory again", [what])
        for slot in slots:
            slot.released.discard(what)

    def peak_memory(self) -> list[int]:
        """Bytes of host memory that each engine held at most since the last time; none where engines compute elsewhere."""
        if self._urls or on_gpus():
            return []
        return list(self._each(self._running(), "peak_memory", "measuring memory").values())

    def _running(self) -> list[Slot]:
        """Who can be asked; one that starts has all its memory when it is ready."""
        return [slot for slot in self.slots if slot.starting is None]

    # ---- weights

    def begin_update(self, version: int) -> None:
        """Open an update of all. An engine that is lost in it is started anew, and renewed before it is next used."""
        self._settle(renew=False)
        self.restarts = 0
        self._updating = list(self.slots)
        self._update("begin_update", version)

    def load(self, buckets: Sequence[BucketSpec]) -> Any:
        return [(slot, slot.actor.load_buckets.remote(buckets)) for slot in self._updating]

    def members(self) -> tuple[Member, ...]:
        return tuple(slot.member for slot in self._updating)

    def ranks(self) -> int:
        return len(self._updating) * self.size

    def load_stream(self, stream: Stream, control: Control) -> None:
        """An engine that is lost, or holds the others up for so long that it must hang, is no longer waited for."""
        slots = list(self._updating)
        calls = {slot.actor.load_stream.remote(stream, at * self.size): at for at, slot in enumerate(slots)}
        before: list[tuple[int, int]] = []
        while calls:
            done, _ = ray.wait(list(calls), num_returns=1, timeout=self.progress_timeout)
            lost = set()
            for call in done:
                at = calls.pop(call)
                if not self._answers([slots[at]], [call], "weight update"):
                    lost.add(at)
            hanging = [] if done else control.holding_up()
            for at in {rank // self.size for rank, _ in hanging} if hanging == before else ():
                calls = {call: place for call, place in calls.items() if place != at}
                self.lose(slots[at], EngineLost(f"it took no weights for {self.progress_timeout:.0f} s"))
                lost.add(at)
            before = hanging
            for at in lost:
                self._updating.remove(slots[at])
                for rank in range(at * self.size, (at + 1) * self.size):
                    control.loaded(rank)

    def link(self, meeting: Meeting, sources: list[Regions], plan: list[list[BucketTensor]]) -> Any:
        first = range(meeting.sources, meeting.world, self.size)
        return [
            (slot, slot.actor.link.remote(meeting, at, sources, plan))
            for slot, at in zip(self._updating, first, strict=True)
        ]

    def lost(self, token: Any, wait: float) -> bool:
        calls = [call for _, call in token]
        done = ray.wait(calls, num_returns=len(calls), timeout=wait)[0] if calls else []
        gone = [slot for slot, call in token if call in done and not self._answers([slot], [call], "weight update")]
        token[:] = [(slot, call) for slot, call in token if slot not in gone]
        self._updating = [slot for slot in self._updating if slot not in gone]
        return bool(gone)

    def unlink(self, token: Any) -> None:
        for slot, call in token:
            try:
                self.answer(slot, call, "weight update")
            except LOST as error:
                self.lose(slot, error)
                self._updating.remove(slot)
            except RunError:
                pass  # as it was told to

    def reach(self, kind: str, paths: Sequence[str]) -> list[str]:
        return [why for answers in self._update("reach", kind, list(paths)).values() for why in answers]

    def expose(self, tensors: Sequence[BucketTensor]) -> dict[Member, list[Exposure]]:
        answers = self._update("expose", list(tensors))
        return {slot.member: answers[slot.number] for slot in self._updating}

    def loaded(self, token: Any) -> None:
        for slot, reference in token:
            if slot in self._updating and not self._answers([slot], [reference], "weight update"):
                self._updating.remove(slot)

    def end_update(self, in_place: Sequence[str] | None = None) -> list[dict[str, int]]:
        prints = self._update("end_update", in_place)
        for slot in self._updating:
            slot.current = True
        return [prints[slot.number] for slot in self._updating]

    def _update(self, method: str, *arguments: Any) -> dict[int, Any]:
        answers = self._each(self._updating, method, "weight update", *arguments)
        self._updating = [slot for slot in self._updating if slot.number in answers]
        return answers

    # ---- losses

    def lose(self, slot: Slot, error: Exception, owed: int = 0) -> None:
        """An engine is gone: start another in its place. RunError where too many were lost since the last weight update."""
        ray.kill(slot.actor)
        slot.starting, slot.current = None, False
        self.restarts += 1
        if self.max_restarts == 0 or self.renew is None:
            raise RunError(str(error)) from None
        if self.restarts > self.max_restarts:
            raise RunError(
                f"{NAME} {slot.number} was lost, and {self.max_restarts} were started anew in this step already "
                f"(rollout.max_restarts): {error}"
            ) from None
        again = f", its {owed} unfinished responses are sampled again" if owed else ""
        self._note(
            f"{NAME} {slot.number} is started anew ({self.restarts} of {self.max_restarts} in this step){again}: {error}"
        )
        self._start(slot)

    def wake(self) -> None:
        """Take in those that were started anew and are ready now: they are given the current weights."""
        for slot in self.slots:
            while slot.starting is not None and self._is_ready(slot, 0.0):
                self._receive(slot)
            if slot.starting is None and not slot.current:
                self._renew(slot)

    def _settle(self, renew: bool = True) -> None:
        """Wait until every engine runs, and with `renew` has the current weights."""
        for slot in self.slots:
            while slot.starting is not None or (renew and not slot.current):
                if slot.starting is None:
                    self._renew(slot)
                elif self._is_ready(slot, self.config.rollout.start_timeout):
                    self._receive(slot)

    def _is_ready(self, slot: Slot, wait: float) -> bool:
        done, _ = ray.wait([slot.starting], timeout=wait)
        limit = self.config.rollout.start_timeout
        if not done and time.monotonic() - slot.begun > limit:
            self.lose(slot, ProcessLost(f"it did not start within {limit:.0f} s"))
        return bool(done)

    def _receive(self, slot: Slot) -> None:
        try:
            (slot.info,) = wait_for([slot.starting], "starting the rollout engine", 1.0, NAME, [slot.number])
        except RunError as error:
            self.lose(slot, error)
        else:
            slot.starting = None

    def _renew(self, slot: Slot) -> None:
        assert self.renew is not None  # nothing is lost and goes on without it
        try:
            self.renew(_One(self, slot))
        except EngineLost as error:  # a rank's loss is nothing that another engine would mend
            self.lose(slot, error)
        else:
            slot.current = True

    def _each(self, slots: Sequence[Slot], method: str, what: str, *arguments: Any) -> dict[int, Any]:
        """The answers of those that are not lost over it."""
        calls = [getattr(slot.actor, method).remote(*arguments) for slot in slots]
        return self._answers(slots, calls, what)

    def _answers(self, slots: Sequence[Slot], references: Sequence[Any], what: str) -> dict[int, Any]:
        answers = {}
        for slot, reference in zip(slots, references, strict=True):
            try:
                (answers[slot.number],) = self.answer(slot, reference, what)
            except LOST as error:
                self.lose(slot, error)
        return answers

    def answer(self, slot: Slot, reference: Any, what: str) -> list[Any]:
        return wait_for([reference], what, self.config.cluster.worker_timeout, NAME, [slot.number])

    # ---- the end

    def shutdown(self) -> None:
        """Ask the engines to end; who is too busy to hear it is killed, and what it started ends with it."""
        actors = [slot.actor for slot in self.slots]
        ray.wait([a.shutdown.remote() for a in actors], num_returns=len(actors), timeout=2)
        for actor in actors:
            ray.kill(actor)

    def _cache_tokens(self, engines: int, oversample: float) -> int | None:
        """On CPU a cache holds an engine's part of a step at once; on GPU SGLang sizes it to the memory it finds."""
        return None if on_gpus() else cache_tokens(self.config, engines, oversample)


class _One:
    """One engine, as the side that weights are given to. Its loss is raised, not mended: who renews it does that."""

    def __init__(self, group: EngineGroup, slot: Slot):
        self._group = group
        self._slot = slot

    def begin_update(self, version: int) -> None:
        self._call("begin_update", version)

    def load(self, buckets: Sequence[BucketSpec]) -> object:
        return self._slot.actor.load_buckets.remote(buckets)

    def members(self) -> tuple[Member, ...]:
        return (self._slot.member,)

    def ranks(self) -> int:
        return self._group.size

    def load_stream(self, stream: Stream, control: Control) -> None:
        self._call("load_stream", stream, 0)

    def link(self, meeting: Meeting, sources: list[Regions], plan: list[list[BucketTensor]]) -> object:
        return self._slot.actor.link.remote(meeting, meeting.sources, sources, plan)

    def lost(self, token: object, wait: float) -> bool:
        if ray.wait([token], timeout=wait)[0]:
            self._answer(token)  # which raises its loss
        return False

    def unlink(self, token: object) -> None:
        """Not called: its loss was raised."""

    def reach(self, kind: str, paths: Sequence[str]) -> list[str]:
        (refused,) = self._call("reach", kind, list(paths))
        return refused

    def expose(self, tensors: Sequence[BucketTensor]) -> dict[Member, list[Exposure]]:
        (exposures,) = self._call("expose", list(tensors))
        return {self._slot.member: exposures}

    def loaded(self, token: object) -> None:
        self._answer(token)

    def end_update(self, in_place: Sequence[str] | None = None) -> list[dict[str, int]]:
        return self._call("end_update", in_place)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return self._answer(getattr(self._slot.actor, method).remote(*arguments))

    def _answer(self, reference: object) -> list[Any]:
        try:
            return self._group.answer(self._slot, reference, "weight update")
        except ProcessLost as error:
            raise EngineLost(str(error)) from None
