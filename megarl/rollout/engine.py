"""One SGLang engine in a process of its own, as plain calls: start, generate, score, take new weights, stop."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megarl.batch.sample import Prompt, Sample
from megarl.cpu import process_env
from megarl.errors import RunError, UserError
from megarl.reshard.bucket import BucketSpec, BucketTensor
from megarl.reshard.exposure import Exposure
from megarl.reshard.link import Meeting, Regions
from megarl.reshard.stream import Stream
from megarl.rollout import session
from megarl.rollout.answers import Open
from megarl.rollout.arguments import EngineSettings
from megarl.rollout.group import begin
from megarl.rollout.router import Router
from megarl.rollout.sampling import Ask, Progress, Sampling

WAIT = 0.5  # seconds that an exchange waits for answers; as long may it take until an engine hears of anything new
_PROGRESS = re.compile(r"\d+%.*(it/s|s/it)")
_ERROR_LINE = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b(?:: .*)?$")


class EngineLost(RunError):
    """An engine that died, hung or answered what cannot be. It is stopped; another one can be started in its place."""


class AnyEngine(ABC):
    """What an engine can be asked, wherever its SGLang runs.

    A refusal is a RunError (UserError where the user can mend it), its end an EngineLost.
    """

    _name: str  # in sentences
    _info: dict[str, Any]
    _open: Open
    _progress_timeout: float
    _seed: int
    _dead: str | None = None

    def __init__(self, progress_timeout: float, seed: int) -> None:
        self._progress_timeout = progress_timeout
        self._seed = seed
        self._keys = itertools.count()

    def ready(self) -> dict[str, Any]:
        """Facts about the running engine: sglang (its version), context_length, longest_prompt,
        max_total_tokens (all in tokens), capacity (responses sampled at one time), vocabulary, stop_token_ids,
        weight_version, updating, sampling (responses asked and not answered), update_seconds (of the last weight update inside
        SGLang: load, prove)."""
        return {**self._info, **self._call("state")}

    def exchange(self, asks: Sequence[Ask], sampling: Sampling, wait: float = WAIT, stop: bool = False) -> Progress:
        """Ask for responses, and take the answers that are there: to these asks or to earlier ones, in any order.

        Waits up to `wait` seconds while there is none. stop: end everything that is asked for; all of it is answered soon, with what
        was sampled until then. Log-probs are those of the whole softmax at the sampling temperature, float32. A sampled
        end-of-sequence token is part of the response. A response never reaches beyond the context length; UserError for
        a prompt that leaves no room. EngineLost also when an answer cannot be right.
        """
        self._open.add(asks)
        try:
            progress = self._call("exchange", list(asks), sampling, wait, stop, timeout=wait + self._progress_timeout)
        except (RunError, UserError):  # nothing was begun
            self._open.forget(asks)
            raise
        if fault := self._open.take(progress, stopping=stop):
            self._fail(f"{self._name} {fault}")
        return progress

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, group_suffix: str = "") -> list[Sample]:
        """Sample `sampling.n` responses a prompt; a prompt's samples stand together and share a group. See `exchange`."""
        groups = begin(prompts, sampling.n, group_suffix)
        router = Router(sampling.max_new_tokens, self._keys, self._seed)
        router.join(0, self._info["capacity"])
        router.add(groups)
        while router.unanswered:
            router.answered(0, self.exchange(router.dispatch([0])[0], sampling).answers)
        return [sample for group in groups for sample in group.samples()]

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (temperature 1) of every token but the first, given those before it: one list of len - 1 a sequence."""
        return self._call("score", [list(ids) for ids in token_ids])

    def begin_update(self, version: int) -> None:
        """Open a weight update. Until `end_update` has succeeded the engine refuses to generate."""
        self._call("begin_update", version)

    def load_buckets(self, buckets: Sequence[BucketSpec]) -> None:
        """Copy the tensors of buckets into the engine's weights. Their files may be reused or removed afterwards.

        Raises RunError naming the tensor that the model does not have, or has in another shape or dtype.
        """
        self._call("load_buckets", list(buckets))

    def end_update(self, in_place: Sequence[str] | None = None) -> dict[str, int]:
        """Close the update and forget what was cached under the old weights.

        Returns the fingerprints, read back from the engine's own parameters: of the buckets that asked for them, or where all was
        written in place, of the tensors named `in_place`.
        Raises RunError when a tensor of the model was not among the buckets.
        """
        return self._call("end_update", None if in_place is None else list(in_place))

    @abstractmethod
    def shutdown(self) -> None:
        """Let go of the engine. Can be called again, and after any failure."""

    @abstractmethod
    def _call(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        """Have the engine do something, within `timeout` seconds (None: progress_timeout)."""

    @abstractmethod
    def _fail(self, what: str) -> None:
        """Raise EngineLost; the engine is gone for good."""


class Engine(AnyEngine):
    """An engine that is started here, in processes of its own, which end with it. Its weights start as the folder's, version 0."""

    _name = "the SGLang engine"

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "bfloat16",
        threads: int | None = None,
        max_total_tokens: int | None = None,
        seed: int = 1,
        extra: dict[str, Any] | None = None,
        start_timeout: float = 600.0,
        progress_timeout: float = 300.0,
        releases: bool = False,
        deterministic: bool = False,
        quantised: bool = False,
        log: str | Path | None = None,
    ):
        """Start an engine on a Hugging Face folder and wait until it answers.

        threads: CPU cores it computes on (None: all), shared out over its ranks (tp_size in `extra`). max_total_tokens: size of
        its KV cache in tokens (None: SGLang's choice on a GPU, a moderate one on CPU). extra: any other SGLang engine argument, with
        the last word. progress_timeout: seconds without a new token, while any is asked for, or without an answer to a call, after
        which the engine is taken for hung. releases: whether it will be asked to `release_memory`; CPU engines always can.
        deterministic: what it says of a response does not depend, to the bit, on what else it is asked. quantised: its linear layers
        are float8 by blocks, and it refuses to sample until it was given them so.
        log: file for what SGLang prints (None: one that is gone with the engine; errors quote from it).
        """
        super().__init__(progress_timeout, seed)
        self._folder = tempfile.mkdtemp(prefix="megarl-engine-")
        self._log = Path(log) if log else Path(self._folder, "log.txt")
        self._shared_files: set[Path] = set()
        settings = EngineSettings(
            str(model_path), dtype, seed, max_total_tokens, dict(extra or {}), releases, deterministic, quantised
        )
        threads = threads or os.cpu_count() or 1
        self._process, self._connection = self._spawn(max(1, threads // settings.ranks))
        try:
            self._info = self._call("start", settings, timeout=start_timeout)
        except EngineLost as error:  # there never was an engine
            raise RunError(str(error)) from None
        except BaseException:
            self.shutdown()
            raise
        self._shared_files = session.shared_files(self._process.pid)  # known before anybody kills it
        self._open = Open(self._info["vocabulary"], progress_timeout)

    def _spawn(self, threads: int) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[2])  # so that the package is found there as it was found here
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, **process_env(threads), "PYTHONPATH": path, "TMPDIR": self._folder, "HF_HUB_OFFLINE": "1"}
        with theirs, self._log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "megarl.rollout.host", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a signal from the terminal is for the controller, which stops engines in order
            )
        return process, Connection(ours.detach())

    def load_stream(self, stream: Stream, first: int) -> None:
        """`load_buckets`, each as soon as it is written, this engine's ranks as loaders `first` and on."""
        self._call("load_stream", stream, first, timeout=stream.timeout + self._progress_timeout)

    def link(self, meeting: Meeting, first: int, sources: list[Regions], plan: list[list[BucketTensor]]) -> None:
        """Within an update: join the group over which buckets come that lie in no file, this engine's ranks as `first` and on."""
        self._call("link", meeting, first, sources, plan, timeout=meeting.timeout + self._progress_timeout)

    def reach(self, kind: str, paths: Sequence[str]) -> list[str]:
        """Within an update: open buckets that trainer's ranks have made in the memory of this engine's devices; why ranks cannot."""
        return self._call("reach", kind, list(paths))

    def expose(self, tensors: Sequence[BucketTensor]) -> list[Exposure]:
        """Within an update: where each rank has its part of these tensors, in memory that others can write to in later updates."""
        return self._call("expose", list(tensors))

    def release_memory(self, what: Collection[str]) -> None:
        """Give memory back, of "weights", of the KV "cache" or of both. Until it is resumed the engine refuses to sample."""
        self._call("release_memory", list(what))

    def resume_memory(self, what: Collection[str]) -> None:
        """Take memory again, of what was released. Weights have to be loaded anew, which they can before the cache is back."""
        self._call("resume_memory", list(what))

    def peak_memory(self) -> int:
        """Bytes of host memory that the engine's processes held at most since the last time (`megarl.cpu.memory.peak`)."""
        return self._call("peak_memory")

    def shutdown(self) -> None:
        """Stop the engine and everything it started. Can be called again, and after any failure."""
        self._connection.close()
        self._shared_files |= session.shared_files(self._process.pid)
        session.kill(self._process.pid)
        self._process.wait()
        session.remove(self._shared_files)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._dead = self._dead or "it was shut down"

    def _call(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        if self._dead:
            raise EngineLost(f"the SGLang engine is not running: {self._dead}")
        doing = {"start": "while starting", "exchange": "while sampling"}.get(method, f"during {method}")
        try:
            self._connection.send((method, arguments))
            limit = self._progress_timeout if timeout is None else timeout
            if not self._connection.poll(limit):
                setting = " (rollout.start_timeout)" if method == "start" else ""
                self._fail(f"the SGLang engine did not answer within {limit:.0f} s {doing}{setting}", errors_only=True)
            answer = self._connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            # what was killed has said nothing of it: its last line would be taken for a reason
            self._fail(f"the SGLang engine died {doing} ({_exit(code)})", errors_only=code < 0)
        if answer[0] == "ok":
            return answer[1]
        raise (UserError if answer[1] == "user" else RunError)(f"the SGLang engine refused {method}: {answer[2]}")

    def _fail(self, what: str, errors_only: bool = False) -> None:
        """Raise `what` with the last error that stands in the engine's log; the engine is gone for good."""
        self._dead = what
        reason = last_error(self._log, errors_only)
        self.shutdown()
        raise EngineLost(f"{what}: {reason}" if reason else what)


def last_error(log: Path, errors_only: bool = False) -> str:
    """The last line of a log that names an exception, else (unless `errors_only`) its last that shows no progress, else ''."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    lines = [line for line in lines if not _PROGRESS.search(line)]
    echoes = ("EOFError", "KeyboardInterrupt")  # of processes that lost the one that failed
    errors = [line for line in lines if _ERROR_LINE.match(line) and not line.startswith(echoes)]
    return (errors or ([] if errors_only else lines) or [""])[-1][:500]


def _exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}" + (", often for want of memory" if code == -signal.SIGKILL else "")
