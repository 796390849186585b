"""Requests on their way through SGLang: begun, collected as they finish, stopped.

SGLang's scheduler is a process of its own and samples on whether anybody waits here or not.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from megarl.errors import UserError
from megarl.rollout.sampling import Answer, Ask, Sampling
from megarl.rollout.stopping import StopText

LINGER = (
    0.05  # seconds after an answer in which others are waited for: an exchange for each would cost more than it brings
)
STOP_EVERY = 4  # tokens between two looks for a stop text


class Way(Protocol):
    """How requests reach SGLang's scheduler."""

    def generate(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """What SGLang answers to a request with these fields of its GenerateReqInput: once, when it is finished; with `stream` also
        before."""

    async def abort(self, rid: str) -> None:
        """End a request, which is then answered with what there is of it; nothing where it is not known there."""

    async def abort_all(self, rids: Sequence[str]) -> None:
        """End all requests that were sent, which are these."""

    async def progress(self) -> int:
        """A number that changes while tokens are sampled for requests that are not finished."""


class Requests:
    """All requests of one engine.

    longest_prompt, room: tokens that it takes, and that prompt and response may have together. prefix: of the requests' ids, which are
    all of one length: SGLang aborts whatever begins like the id it is given.
    """

    def __init__(
        self,
        way: Way,
        *,
        stop_token_ids: Sequence[int],
        longest_prompt: int,
        room: int,
        decoder: Callable[[], Callable[[Sequence[int]], str]],
        prefix: str = "",
    ):
        self._way = way
        self._prefix = prefix
        self._stop_token_ids = list(stop_token_ids)
        self._longest_prompt = longest_prompt
        self._room = room
        self._decoder = decoder
        self._tasks: set[asyncio.Task[Answer]] = set()
        self._sent: set[str] = set()  # ids of requests that SGLang has not finished
        self._tokens = 0  # of responses that are finished
        self._turn = 0  # counts the times that everything was stopped
        self._others = 0  # requests that are no ask's

    def __len__(self) -> int:
        return len(self._tasks)

    def check(self, asks: Sequence[Ask]) -> None:
        """UserError for a prompt that leaves no room for a response."""
        for ask in asks:
            if not 0 < len(ask.prompt_ids) <= self._longest_prompt:
                raise UserError(
                    f"a prompt has {len(ask.prompt_ids)} tokens; this engine takes 1 to {self._longest_prompt}"
                )

    async def begin(self, asks: Sequence[Ask], sampling: Sampling, version: int) -> None:
        """Send asks to the scheduler. Where several share a prompt it is read first: the others find it in the cache."""
        counts = Counter(tuple(ask.prompt_ids) for ask in asks)
        # One greedy request in a batch, and SGLang sorts the vocabulary for all of them at every token from then on.
        first = {
            ids: asyncio.create_task(self._read(list(ids), _cut(sampling)))
            for ids, count in counts.items()
            if count > 1
        }
        for ask in asks:
            response = self._respond(ask, sampling, version, first.get(tuple(ask.prompt_ids)))
            self._tasks.add(asyncio.create_task(response))

    async def collect(self, wait: float) -> list[Answer]:
        """The answers that are there, waited for up to `wait` seconds while there is none."""
        if not self._tasks:
            return []
        done, pending = await asyncio.wait(self._tasks, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        if done and pending:
            more, _ = await asyncio.wait(pending, timeout=LINGER)
            done |= more
        self._tasks -= done
        answers = [task.result() for task in done]
        self._tokens += sum(len(answer.token_ids) for answer in answers)
        return sorted(answers)

    async def stop(self) -> None:
        """End every request; what was sampled so far comes as answers."""
        self._turn += 1
        await self._way.abort_all(list(self._sent))

    async def tokens(self) -> int:
        """A number that changes when tokens are sampled, as far as the scheduler tells of them."""
        return self._tokens + await self._way.progress()

    async def score(self, token_ids: Sequence[list[int]]) -> list[list[float]]:
        """Log-probs (temperature 1) of every token but the first, given those before it."""

        async def of(ids: list[int]) -> list[float]:
            output = await self._read(ids, {"temperature": 1.0}, return_logprob=True, logprob_start_len=0)
            return [float(entry[0]) for entry in output["meta_info"]["input_token_logprobs"][1:]]

        return list(await asyncio.gather(*(of(ids) for ids in token_ids)))

    # ---- one request

    async def _read(self, ids: list[int], sampling_params: dict[str, float], **fields: Any) -> dict[str, Any]:
        """Have tokens read, and none sampled."""
        self._others += 1
        rid = f"{self._prefix}o{self._others:015d}"
        params = {"max_new_tokens": 0, **sampling_params}
        output: dict[str, Any] = {}
        async for answer in self._send({"input_ids": ids, "sampling_params": params, "rid": rid, **fields}):
            output = answer
        return output

    async def _respond(self, ask: Ask, sampling: Sampling, version: int, prefill: asyncio.Task[Any] | None) -> Answer:
        turn = self._turn
        if prefill is not None:
            await prefill
        if turn != self._turn:
            return Answer(ask.key, [], [], "abort", version)
        ids = ask.prompt_ids + ask.begun_ids
        budget = min(ask.budget, self._room - len(ids))
        if budget < 1 or len(ids) > self._longest_prompt:  # a response that is taken up again where its room ends
            return Answer(ask.key, [], [], "length", version)
        request = {
            "input_ids": ids,
            "sampling_params": {
                **_cut(sampling),
                "max_new_tokens": budget,
                "sampling_seed": ask.seed,
                "stop_token_ids": [*self._stop_token_ids, *sampling.stop_token_ids],
                "stream_interval": STOP_EVERY if sampling.stop else None,
            },
            "return_logprob": True,
            "rid": f"{self._prefix}r{ask.key:015d}",
            "stream": bool(sampling.stop),
        }
        final, cut = await self._follow(request, ask.begun_ids, sampling.stop)
        ends = {*self._stop_token_ids, *sampling.stop_token_ids}
        return _answer(ask.key, final, cut, ends, version)

    async def _send(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self._sent.add(request["rid"])
        try:
            async for output in self._way.generate(request):
                yield output
        finally:
            self._sent.discard(request["rid"])

    async def _follow(
        self, request: dict[str, Any], begun: list[int], stop: tuple[str, ...]
    ) -> tuple[dict[str, Any], int | None]:
        """The final output, and how many of its tokens remain where a stop text was completed."""
        watch = StopText(stop, self._decoder(), len(begun)) if stop else None
        final: dict[str, Any] = {}
        cut: int | None = None
        async for final in self._send(request):
            if watch is not None and cut is None:
                end = watch.cut(begun + final["output_ids"])
                if end is not None:
                    cut = end - len(begun)
                    await self._way.abort(request["rid"])
        return final, cut


def _cut(sampling: Sampling) -> dict[str, float]:
    """What tokens are drawn from, as SGLang names it."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
    }


def _answer(key: int, final: dict[str, Any], cut: int | None, ends: set[int], version: int) -> Answer:
    meta = final["meta_info"]
    reason = meta["finish_reason"]["type"]
    ids = list(final["output_ids"])
    log_probs = [float(entry[0]) for entry in meta.get("output_token_logprobs") or []]
    if cut is not None:
        return Answer(key, ids[:cut], log_probs[:cut], "stop", version)
    if reason == "abort" and ids and ids[-1] in ends:  # it was just done
        reason = "stop"
    return Answer(key, ids, log_probs, reason, version)
