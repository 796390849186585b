"""An SGLang server over HTTP: what it is asked, and what it may answer. Nothing here knows of weights or samples."""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from megarl.errors import RunError

_EXCERPT = 200  # characters of an answer that are quoted
_LOOK = 10.0  # seconds that a look at the server's load may take
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Unanswered(RunError):
    """The end of a sentence about a server: it cannot be reached, or answers what it should not."""


class Refused(Unanswered):
    """It answered with an HTTP error."""


def ask(url: str, path: str, body: dict[str, Any] | None = None, timeout: float = 30.0) -> Any:
    """The JSON that a server answers, within `timeout` seconds; a POST where there is a body, and None for an empty answer.

    Raises Unanswered.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with _NO_PROXY.open(request, timeout=timeout) as response:
            return _json(path, response.read())
    except urllib.error.HTTPError as error:
        raise Refused(_status(path, error.code, error.read())) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        silent = isinstance(reason, TimeoutError)
        raise Unanswered(
            f"did not answer within {timeout:.0f} s" if silent else f"does not answer ({reason})"
        ) from None


class Web:
    """The way of requests to a server (`megarl.rollout.requests.Way`). Raises Unanswered."""

    def __init__(self, url: str):
        self._url = url
        self._session: Any = None
        self._seen = 0
        self.version: str | None = None  # of the weights that every answer must be of; None: any

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Each answer was looked at: token ids, a log-prob each, why it ended, and with which weights."""
        path = "/generate"
        async for output in self._outputs(path, request):
            if not _is_output(output):
                raise Unanswered(f"answered {path} with what is no response: {_quoted(json.dumps(output))}")
            self._check_version(output["meta_info"])
            yield output

    async def abort(self, rid: str) -> None:
        await self._read("/abort_request", {"rid": rid})

    async def abort_all(self, rids: Sequence[str]) -> None:
        await asyncio.gather(*(self.abort(rid) for rid in rids))  # others may use the server, too

    async def progress(self) -> int:
        """Tokens that it holds and has read: they change while it samples. The last known where it does not tell in time."""
        try:
            answer = await asyncio.wait_for(self._read("/v1/loads?include=core"), _LOOK)
            self._seen = sum(
                load["num_used_tokens"] + load["total_prefill_uncached_tokens"] for load in answer["loads"]
            )
        except TimeoutError:
            pass
        except (KeyError, TypeError) as error:
            raise Unanswered(f"answered /v1/loads with what is no load: {error!r}") from None
        return self._seen

    async def close(self) -> None:
        """Requests that are not answered yet end with their connections: SGLang aborts them."""
        if self._session is not None:
            await self._session.close()

    # ---- HTTP

    async def _outputs(self, path: str, request: dict[str, Any]) -> AsyncIterator[Any]:
        if not request.get("stream"):
            yield await self._read(path, request)
            return
        whole = False
        async with self._opened(path, request) as response:
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                whole = data == b"[DONE]" or whole
                if data and not whole:
                    yield _json(path, data)
        if not whole:
            raise Unanswered(f"ended its answer to {path} before it was whole")

    async def _read(self, path: str, body: dict[str, Any] | None = None) -> Any:
        async with self._opened(path, body) as response:
            return _json(path, await response.read())

    @asynccontextmanager
    async def _opened(self, path: str, body: dict[str, Any] | None) -> AsyncIterator[Any]:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # as many connections as there are requests
                timeout=aiohttp.ClientTimeout(total=None),  # who waits has a clock of his own
                read_bufsize=1 << 24,  # a line of a stream holds a whole response
            )
        try:
            async with self._session.request(
                "GET" if body is None else "POST", self._url + path, json=body
            ) as response:
                if response.status != 200:
                    raise Refused(_status(path, response.status, await response.read()))
                yield response
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unanswered(f"does not answer ({str(error) or type(error).__name__})") from None

    def _check_version(self, meta: dict[str, Any]) -> None:
        versions = {str(span["version"]) for span in meta.get("weight_versions") or []} | {
            str(meta.get("weight_version"))
        }
        if self.version is not None and versions != {self.version}:
            others = ", ".join(sorted(versions - {self.version}))
            raise Unanswered(
                f"sampled with weights of version {others}, and was given {self.version}: somebody else changed them"
            )


def _is_output(output: Any) -> bool:
    try:
        meta, ids = output["meta_info"], output["output_ids"]
        reason = meta["finish_reason"]
        entries = [*(meta.get("output_token_logprobs") or []), *(meta.get("input_token_logprobs") or [])[1:]]
        return (
            isinstance(ids, list)
            and all(type(token) is int for token in ids)
            and (reason is None or isinstance(reason["type"], str))
            and all(isinstance(entry[0], int | float) for entry in entries)
        )
    except (KeyError, TypeError, IndexError):
        return False


def _json(path: str, data: bytes) -> Any:
    if not data:
        return None
    try:
        return json.loads(data)
    except ValueError:
        raise Unanswered(f"answered {path} with what is not JSON: {_quoted(data.decode(errors='replace'))}") from None


def _status(path: str, status: int, said: bytes) -> str:
    return f"answered {path} with HTTP {status}: {_quoted(said.decode(errors='replace')) or 'no reason given'}"


def _quoted(text: str) -> str:
    """On one line, and not longer than a sentence can hold."""
    line = " ".join(text.split())
    return line if len(line) <= _EXCERPT else line[:_EXCERPT] + " …"
