"""SGLang's engine behind the few calls that a trainer needs. Lives in the host process, see `megarl.rollout.host`."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import sglang
import torch
from sglang.srt.entrypoints.engine import Engine as SGLangEngine
from sglang.srt.managers.io_struct import GenerateReqInput, UpdateWeightsFromTensorReqInput

from megarl.cpu import has_cuda
from megarl.cpu.memory import peak
from megarl.errors import RunError, UserError
from megarl.reshard.bucket import BucketSpec, BucketTensor
from megarl.reshard.exposure import Exposure
from megarl.reshard.link import Meeting, Regions
from megarl.reshard.stream import Stream
from megarl.rollout import loader, session
from megarl.rollout.arguments import EngineSettings, arguments, problems
from megarl.rollout.folder import decoder, end_tokens
from megarl.rollout.requests import Requests
from megarl.rollout.serving import Serving

_TAGS = {"weights": "weights", "cache": "kv_cache"}  # SGLang's names of memory
_IDLE_WITHIN = 30.0  # seconds after its last answer


class _Quiet(SGLangEngine):
    """Without the detokenizer's process: token ids go in and out, so it would only cost start-up time and memory."""

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> tuple[list[Any], list[str]]:
        return [], []


class _Inside:
    """The way of requests to an SGLang in this process."""

    def __init__(self, manager: Any):
        self._manager = manager

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for output in self._manager.generate_request(GenerateReqInput(**request)):
            yield output

    async def abort(self, rid: str) -> None:
        self._manager.abort_request(rid)

    async def abort_all(self, rids: Sequence[str]) -> None:
        self._manager.abort_request(abort_all=True)  # also what is on its way to the scheduler

    async def progress(self) -> int:
        return sum(len(state.output_ids) for state in self._manager.rid_to_state.values())


class Server(Serving):
    """The engine that is started with such settings. Raises UserError for an argument that SGLang does not have."""

    def __init__(self, settings: EngineSettings):
        super().__init__()
        folder = Path(settings.model_path)
        self.stop_token_ids = end_tokens(folder)
        self.ranks = settings.ranks
        if self.ranks > 1 and not has_cuda():
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _cores(self.ranks))
        if found := problems(settings.extra):
            raise UserError("; ".join(found))
        self.engine = _Quiet(**arguments(settings))
        self.loop = self.engine.loop
        limits = self.engine._scheduler_init_result.scheduler_infos[0]
        self.max_total_tokens = int(limits["max_total_num_tokens"])
        self.longest_prompt = int(limits["max_req_input_len"]) - 1  # SGLang refuses the limit itself
        self.context_length = int(self.engine.tokenizer_manager.context_len)
        # Else Python walks through every object of SGLang's processes, a third of a second each time a cache is flushed.
        self._run(self.engine.tokenizer_manager.freeze_gc())
        state = self._run(self.engine.tokenizer_manager.get_internal_state())[0]
        self.capacity = int(state["effective_max_running_requests_per_dp"])
        self.requests = Requests(
            _Inside(self.engine.tokenizer_manager),
            stop_token_ids=self.stop_token_ids,
            longest_prompt=self.longest_prompt,
            room=min(self.context_length, self.max_total_tokens) - 1,
            decoder=functools.cache(lambda: decoder(folder)),
        )
        self._exposed = False  # whether ranks can write into its weights
        self._opened = False  # whether SGLang knows of an update: it is told with what else it is told first
        self._ended = False  # whether it has the new weights' version already
        if settings.quantised:
            self.broken = "it holds linear layers in float8, which its folder does not, and nothing was loaded since it was started"
        self.expected: set[str] = set()
        self.loaded: set[str] = set()

    def info(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "sglang": sglang.__version__,
            "context_length": self.context_length,
            "max_total_tokens": self.max_total_tokens,
            "longest_prompt": self.longest_prompt,
            "stop_token_ids": self.stop_token_ids,
            "capacity": self.capacity,
            "vocabulary": int(self.engine.tokenizer_manager.model_config.vocab_size),
        }

    # ---- weights

    def _open_update(self) -> None:
        if "weights" in self.released:
            raise RunError("the memory of its weights is released")
        self.expected, self.loaded, self._ended = set(), set(), False

    def link(self, meeting: Meeting, first: int, sources: list[Regions], plan: list[list[BucketTensor]]) -> None:
        self._ask(loader.link_request(meeting, first, sources, plan), again=True)

    def load_buckets(self, buckets: Sequence[BucketSpec]) -> None:
        request = loader.buckets_request(buckets)
        if self._opened or not buckets or not all(bucket.in_place for bucket in buckets):
            self._take(self._ask(request), buckets)
        else:  # all of the update
            self._take(self._finish(request), buckets)
            self._ended = True

    def load_stream(self, stream: Stream, first: int) -> None:
        self._take(self._ask(loader.stream_request(stream, first)), stream.buckets)

    def reach(self, kind: str, paths: Sequence[str]) -> list[str]:
        return self._ask(loader.reach_request(kind, paths))["refused"]

    def expose(self, tensors: Sequence[BucketTensor]) -> list[Exposure]:
        exposed = self._ask(loader.expose_request(tensors))["exposed"]
        self._exposed = True
        return exposed

    def _take(self, report: dict[str, Any], buckets: Sequence[BucketSpec]) -> None:
        self.expected |= report["expected"]
        self.loaded.update(item.name for bucket in buckets for item in bucket.tensors)
        self.fingerprints |= report["fingerprints"]
        for what, seconds in report["seconds"].items():
            self.seconds[what] += seconds

    def _ask(self, what: str, last: bool = False, again: bool = False) -> dict[str, Any]:
        """What the schedulers' loaders answer together. `last` of an update: keys and values of the old weights must not serve the new
        ones and are forgotten, and the new weights get their version. `again`: where it fails the update goes on."""

        def send(request: Path) -> None:
            if not self._opened:
                _accepted(self.engine.begin_weight_update())
                self._opened = True
            message = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=self.engine._serialize_tensors_per_rank(
                    [(str(request), torch.empty(0))], loader.FORMAT
                ),
                load_format=loader.FORMAT,
                flush_cache=last,
                weight_version=str(self.updating) if last else None,
            )
            _accepted(self._run(self.engine.tokenizer_manager.update_weights_from_tensor(message)))

        return self._answered(what, send, again)

    def _finish(self, what: str) -> dict[str, Any]:
        """As the `last` of an update in which SGLang was given nothing: one message instead of the three that it needs for weights."""

        def tell(request: Path) -> None:
            try:
                self.engine.collective_rpc(loader.FINISH, request=str(request), version=str(self.updating))
            except AssertionError as error:  # SGLang's way to say what a scheduler raised
                raise RunError(str(error)) from error

        def send(request: Path) -> None:
            tell(request)
            if loader.was_busy(request) and self._await_idle().success:
                tell(request)

        report = self._answered(what, send)
        self.engine.tokenizer_manager._update_weight_version_if_provided(str(self.updating))
        return report

    def _answered(self, what: str, send: Callable[[Path], None], again: bool = False) -> dict[str, Any]:
        if self.updating is None:
            raise RunError("no weight update was begun")
        folder = tempfile.mkdtemp(prefix="request-")  # a file that is written again waits for the disk
        request = Path(folder, "request.json")
        request.write_text(what)
        try:
            send(request)
            return loader.read_reports(request, self.ranks)
        except RunError as error:
            if not again:
                self._give_up(str(error))
            raise
        finally:
            shutil.rmtree(folder)

    def end_update(self, in_place: Sequence[str] | None) -> dict[str, int]:
        if self.updating is None:
            raise RunError("no weight update was begun")
        if missing := sorted(self.expected - self.loaded):
            some = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            self._give_up(f"the update brought no {some}")
            raise RunError(self.broken)
        brought = self._opened or self._ended or (in_place is not None and self._exposed)
        if not brought:
            self._give_up("the update brought no weights")
            raise RunError(self.broken)
        prove = loader.prove_request(in_place or [])
        if self._opened:
            self._take(self._ask(prove, last=True), [])
        elif not self._ended:
            self._take(self._finish(prove), [])
        elif in_place:
            self._give_up("its update has ended: what was written in place since is not proved")
            raise RunError(self.broken)
        self._close()
        self.version, self.updating = self.updating, None
        return self.fingerprints

    def _give_up(self, why: str) -> None:
        """Leave the update, so that another one can begin; until one succeeds nothing is sampled."""
        if self.updating is not None:
            self._close()
            self.broken, self.updating = why, None

    def _close(self) -> None:
        if self._opened:
            _accepted(self.engine.end_weight_update())
            self._opened = False

    # ---- memory

    def release_memory(self, what: Collection[str]) -> None:
        """`what`: of "weights" and "cache"."""
        idle = self._await_idle()  # a scheduler that is not ends when it is to release memory
        if not idle.success:
            raise RunError(f"it is not idle, and cannot give memory back ({idle.message})")
        self.engine.release_memory_occupation([_TAGS[name] for name in what])
        self.released |= set(what)
        if "weights" in what:
            self.broken = "their memory was released and nothing was loaded since"

    def _await_idle(self) -> Any:
        """The last answer may be here before the scheduler has become idle."""
        return self._run(self.engine.tokenizer_manager.flush_cache(timeout_s=_IDLE_WITHIN))

    def resume_memory(self, what: Collection[str]) -> None:
        self.engine.resume_memory_occupation([_TAGS[name] for name in what])
        self.released -= set(what)

    def peak_memory(self) -> int:
        return peak(session.processes(os.getsid(0)))


def _cores(ranks: int) -> str:
    """This machine's cores, shared out: SGLang asks for it where an engine has more ranks than the machine has NUMA nodes."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::ranks] or [cores[rank % len(cores)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def _accepted(answer: Any) -> None:
    """SGLang answers (False, why) instead of raising."""
    success, message = answer[0], answer[1]
    if not success:
        raise RunError(str(message))
