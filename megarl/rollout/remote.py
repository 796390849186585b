"""An SGLang server that runs already, by its URL: it is neither started nor stopped here, and takes weights from a folder."""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import RunError, UserError
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.fingerprint import fingerprint
from megarl.rollout.answers import Open
from megarl.rollout.engine import AnyEngine, EngineLost
from megarl.rollout.folder import decoder, end_tokens, vocabulary
from megarl.rollout.requests import Requests
from megarl.rollout.serving import Serving
from megarl.rollout.web import Refused, Unanswered, Web, ask

_MARGIN = 5  # SGLang's scheduler takes prompts that are by so many tokens shorter than what it has room for


@dataclass(frozen=True)
class Facts:
    """What a server says of itself. Lengths in tokens."""

    sglang: str  # its version
    model_type: str
    model_path: str
    dtype: str  # "auto" where it was not told one
    quantization: str | None
    room: int  # for a prompt and its response together
    longest_prompt: int
    max_total_tokens: int
    capacity: int  # responses sampled at one time
    odd: tuple[str, ...]  # settings that change what it answers

    @classmethod
    def of(cls, url: str, timeout: float = 30.0) -> Facts:
        """Raises Unanswered."""
        server, model = (ask(url, path, timeout=timeout) for path in ("/server_info", "/model_info"))
        try:
            longest = int(server["max_req_input_len"])
            states = server["internal_states"]
            odd = {
                key: server.get(key)
                for key in ("incremental_streaming_output", "preferred_sampling_params", "is_embedding")
            }
            return cls(
                sglang=str(server["version"]),
                model_type=str(model["model_type"]),
                model_path=str(model["model_path"]),
                dtype=str(server["dtype"]),
                quantization=server["quantization"],
                room=longest + _MARGIN,
                longest_prompt=longest - 1,  # SGLang refuses the limit itself
                max_total_tokens=int(server["max_total_num_tokens"]),
                capacity=sum(int(state["effective_max_running_requests_per_dp"]) for state in states),
                odd=tuple(f"{key}={value}" for key, value in odd.items() if value),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Unanswered(
                f"does not answer as an SGLang server does ({error!r} in /server_info or /model_info)"
            ) from None


def knows_token(url: str, token: int) -> bool:
    """Whether a token is in the vocabulary of a server's model. Raises Unanswered."""
    body = {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "token_ids_logprob": [token],
    }
    try:
        ask(url, "/generate", body)
    except Refused as error:
        if "vocabulary" not in str(error):
            raise
        return False
    return True


class RemoteServer(Serving):
    """What `megarl.rollout.server.Server` does, by HTTP."""

    def __init__(self, url: str, folder: Path, facts: Facts, timeout: float):
        super().__init__()
        self.url = url
        self.timeout = timeout
        self.loop = asyncio.new_event_loop()
        self.web = Web(url)
        self.requests = Requests(
            self.web,
            stop_token_ids=end_tokens(folder),
            longest_prompt=facts.longest_prompt,
            room=facts.room,
            decoder=functools.cache(lambda: decoder(folder)),
            prefix=uuid.uuid4().hex,  # others may use the server, too, and an earlier run that was killed
        )

    def load_buckets(self, buckets: Sequence[BucketSpec]) -> None:
        """Have SGLang load the folder of the buckets, then take the fingerprints of the files that it was given."""
        (folder,) = {str(Path(bucket.path).parent) for bucket in buckets}
        body = {"model_path": folder, "load_format": "auto", "weight_version": str(self.updating), "flush_cache": True}
        begun = time.perf_counter()
        try:
            answer = ask(self.url, "/update_weights_from_disk", body, self.timeout)
            if not answer["success"]:
                raise RunError(str(answer["message"]))
        except RunError as error:
            self.broken, self.updating = str(error), None
            raise
        self.seconds["load"] = time.perf_counter() - begun
        begun = time.perf_counter()
        for bucket in buckets:
            views = bucket.views()
            self.fingerprints |= {name: fingerprint(views[name]) for name in bucket.prove}
        self.seconds["prove"] = time.perf_counter() - begun

    def end_update(self, in_place: Sequence[str] | None) -> dict[str, int]:
        assert in_place is None  # nobody writes into the memory of a server elsewhere
        version, self.updating = self.updating, None
        self.version = int(version if version is not None else self.version)
        self.web.version = str(self.version)
        return self.fingerprints

    def close(self) -> None:
        self._run(self._close())
        self.loop.close()

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.web.close()


class RemoteEngine(AnyEngine):
    """A server as an engine. Its weights are proved as the files that it was given; whether it computes with them, log-probs have to
    tell."""

    def __init__(self, url: str, model_path: str, *, seed: int = 1, progress_timeout: float = 300.0):
        """`model_path`: the model's folder, for its vocabulary and tokenizer. Raises RunError where the server does not answer."""
        super().__init__(progress_timeout, seed)
        self._name = f"the SGLang server at {url}"
        folder = Path(model_path)
        try:
            facts = Facts.of(url)
        except Unanswered as error:
            raise RunError(f"{self._name} {error}") from None
        self._info = {
            "sglang": facts.sglang,
            "context_length": facts.room + 1,
            "max_total_tokens": facts.max_total_tokens,
            "longest_prompt": facts.longest_prompt,
            "stop_token_ids": end_tokens(folder),
            "capacity": facts.capacity,
            "vocabulary": vocabulary(folder),
        }
        self._server = RemoteServer(url, folder, facts, progress_timeout)
        self._open = Open(self._info["vocabulary"], progress_timeout)

    def shutdown(self) -> None:
        if self._dead is None:
            self._dead = "its connection was closed"
            self._server.close()

    def _call(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        if self._dead:
            raise EngineLost(f"{self._name} is not asked any more: {self._dead}")
        try:
            return getattr(self._server, method)(*arguments)
        except Unanswered as error:
            self._fail(f"{self._name} {error}")
        except (RunError, UserError) as error:
            raise type(error)(f"{self._name} refused {method}: {error}") from None

    def _fail(self, what: str) -> None:
        self.shutdown()
        self._dead = what
        raise EngineLost(what)
