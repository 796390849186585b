"""What runs inside SGLang's schedulers, one a tensor-parallel rank, when weights arrive: it takes a bucket into the model.

SGLang calls `load` for `update_weights_from_tensor(load_format="megarl.rollout.loader.load")`. The tensors of that call are
placeholders; their names are paths of files that hold a request. SGLang answers "Success" whatever happens here, and
skips names that it does not know in silence, so every bucket is checked before and read back after, and every rank writes the
outcome to a report file beside the request.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megarl.bridge import fp8
from megarl.errors import RunError
from megarl.reshard import devices
from megarl.reshard.bucket import BucketSpec, BucketTensor
from megarl.reshard.exposure import Exposure
from megarl.reshard.fingerprint import combine, partial
from megarl.reshard.link import Inlet, Meeting, Part, Regions
from megarl.reshard.stream import Control, Stream
from megarl.rollout import scales
from megarl.rollout.exposing import Memory
from megarl.rollout.shards import Shard, shards_of

FORMAT = "megarl.rollout.loader.load"
FINISH = "megarl_finish"  # `finish`, as a method of SGLang's scheduler

_BUSY = "the cache of the old weights was not flushed: responses are still being sampled"
_NOTHING: dict[str, Any] = {"parts": [], "expected": [], "seconds": {"load": 0.0, "prove": 0.0}}  # a report of no news

# Of this scheduler:
_inlet: Inlet | None = None  # where weights come as messages
_linked: torch.nn.Module | None = None  # whose
_known: _Places | None = None  # of the last update that came so
_memory: Memory | None = None  # where ranks write into its weights


def buckets_request(buckets: Sequence[BucketSpec]) -> str:
    """Load buckets, one after the other."""
    return json.dumps({"buckets": [bucket.to_json() for bucket in buckets]})


def stream_request(stream: Stream, first: int) -> str:
    """Load all buckets of an update as they are written, the engine's rank 0 as loader `first`."""
    return json.dumps({"stream": stream.to_json(), "first": first})


def link_request(meeting: Meeting, first: int, sources: list[Regions], plan: list[list[BucketTensor]]) -> str:
    """Join a group over which buckets will come, the engine's rank 0 as `first`."""
    return json.dumps({"link": {"meeting": asdict(meeting), "first": first, "sources": sources, "plan": plan}})


def reach_request(kind: str, paths: Sequence[str]) -> str:
    """Have each rank of the engine open buckets in its device's memory."""
    return json.dumps({"reach": [kind, list(paths)]})


def expose_request(tensors: Sequence[BucketTensor]) -> str:
    """Have each rank of the engine move its weights to where others can map them, and say where these tensors lie."""
    return json.dumps({"expose": [(item.name, item.shape) for item in tensors]})


def prove_request(names: Sequence[str]) -> str:
    """Take fingerprints of tensors that were exposed."""
    return json.dumps({"prove": list(names)})


def read_reports(request: Path, ranks: int) -> dict[str, Any]:
    """What all ranks say together: {"fingerprints": {name: int}, "expected": {names of all tensors of the model},
    "seconds": {what: of the slowest rank}, "exposed": [Exposure of each rank that was asked for it], "refused": [why ranks cannot
    reach the buckets that they were asked to]}.

    Raises RunError with the loader's own words where a rank failed or wrote nothing, and where two ranks that hold the same part of
    a tensor hold it differently.
    """
    reports = [_read_report(request, rank) for rank in range(ranks)]
    parts: dict[str, dict[tuple[int, ...], int]] = {}
    for rank, report in enumerate(reports):
        for name, origin, value in report["parts"]:
            known = parts.setdefault(name, {}).setdefault(tuple(origin), value)
            if known != value:
                raise RunError(
                    f"weight sync: {name} in the engine's rank {rank} differs from another rank's copy of it"
                )
    return {
        "fingerprints": {name: combine(list(shares.values())) for name, shares in parts.items()},
        "expected": {name for report in reports for name in report["expected"]},
        "seconds": {what: max(report["seconds"][what] for report in reports) for what in ("load", "prove")},
        "exposed": [Exposure.from_json(report["exposed"]) for report in reports if "exposed" in report],
        "refused": [report["refused"] for report in reports if report.get("refused")],
    }


def _read_report(request: Path, rank: int) -> dict[str, Any]:
    try:
        report = json.loads(_report_path(request, rank).read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"no report came back from loading {request}: {error}") from error
    if "error" in report:
        raise RunError(report["error"])
    return report


def was_busy(request: Path) -> bool:
    """Whether `finish` found that the schedulers, which all do the same, were still sampling, and did nothing."""
    try:
        return json.loads(_report_path(request, 0).read_text()).get("error") == _BUSY
    except (OSError, ValueError):
        return False  # `read_reports` says so


def _report_path(request: Path, rank: int) -> Path:
    return request.with_suffix(f".report-{rank}")


def _offer_finish() -> None:
    """Let SGLang's `collective_rpc` reach `finish`."""
    from sglang.srt.managers.scheduler import Scheduler

    setattr(Scheduler, FINISH, finish)


def finish(scheduler: Any, request: str, version: str) -> None:
    """A method of SGLang's scheduler that ends an update in which weights were written in place, or that is all of one in which they
    come there as messages: what was cached under the old ones is forgotten, `request` is done, and the new ones get their version. The
    outcome is in its report."""
    from sglang.srt.runtime_context import get_parallel

    path = Path(request)
    report: dict[str, Any] = {"error": _BUSY}
    if scheduler.flush_cache(empty_cache=False):
        report = _reported(lambda: _finished(json.loads(path.read_text())))
    if "error" not in report:
        scheduler.record_weight_version_change(version)
    _write_report(path, get_parallel().tp_rank, report)


def _finished(request: dict[str, Any]) -> dict[str, Any]:
    if "prove" in request:
        return _proved(request["prove"])
    if _linked is None:
        raise RunError("nothing was linked that weights could come from")
    return load_buckets(_linked, [BucketSpec.from_json(text) for text in request["buckets"]], None, 0)


def load(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's custom weight loader. Never raises: an exception here would end the scheduler."""
    from sglang.srt.runtime_context import get_parallel

    _ask_once()
    rank = get_parallel().tp_rank
    for path, _ in named_tensors:
        report = _reported(lambda path=path: _done(model, json.loads(Path(path).read_text()), rank))
        _write_report(Path(path), rank, report)


def _reported(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except Exception as error:  # noqa: BLE001  raising here would end the scheduler
        return {"error": str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"}


def _write_report(request: Path, rank: int, report: dict[str, Any]) -> None:
    unfinished = request.with_suffix(f".writing-{rank}")
    unfinished.write_text(json.dumps(report))
    os.replace(unfinished, _report_path(request, rank))


def _ask_once() -> None:
    """Before each update SGLang looks through all modules for caches that would not follow new weights: as long as copying 50 MB.
    What it looks for is settled when the model is built, so it need not look again."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    if not hasattr(weight_updater._unsupported_derived_weight_cache_error, "cache_info"):
        weight_updater._unsupported_derived_weight_cache_error = functools.cache(
            weight_updater._unsupported_derived_weight_cache_error
        )


def _done(model: torch.nn.Module, request: dict[str, Any], rank: int) -> dict[str, Any]:
    global _inlet, _linked, _memory, _known
    if "prove" in request:
        return _proved(request["prove"])
    if "reach" in request:
        return _NOTHING | {"refused": devices.reach(*request["reach"])}
    if "expose" in request:
        _known = None  # it keeps memory that is moved from
        _memory = _memory or Memory(model)
        _offer_finish()
        exposure = _memory.expose(model, [(name, tuple(shape)) for name, shape in request["expose"]])
        return _NOTHING | {"exposed": exposure.to_json()}
    if "buckets" in request:
        return load_buckets(model, [BucketSpec.from_json(text) for text in request["buckets"]], None, 0)
    if "stream" in request:
        stream = Stream.from_json(request["stream"])
        return load_buckets(model, stream.buckets, Control(stream), request["first"] + rank)
    _inlet = None  # the group before it, with its threads
    asked = request["link"]
    sources = [
        {name: [tuple((a, b, step) for a, b, step in region) for region in regions] for name, regions in source.items()}
        for source in asked["sources"]
    ]
    plan = [[BucketTensor.of(item) for item in tensors] for tensors in asked["plan"]]
    _inlet, _linked = Inlet(Meeting(**asked["meeting"]), asked["first"] + rank, sources, plan), model
    _offer_finish()
    return _NOTHING


def _proved(names: Sequence[str]) -> dict[str, Any]:
    """Fingerprints of this rank's parts of tensors that were exposed."""
    begun = time.perf_counter()
    held = _memory.held if _memory is not None else {}
    if _memory is not None:
        _memory.check()
    if strange := [name for name in names if name not in held]:
        raise RunError(f"{strange[0]} was not exposed")
    parts = [(name, held[name].origin, partial(held[name].view, held[name].origin)) for name in names]
    return _NOTHING | {"parts": parts, "seconds": {"load": 0.0, "prove": time.perf_counter() - begun}}


@torch.no_grad()
def load_buckets(
    model: torch.nn.Module, buckets: Sequence[BucketSpec], control: Control | None, me: int
) -> dict[str, Any]:
    """Load buckets into `model`, and report on the model's own copy. Raises RunError naming the tensor that does not fit.

    A bucket has whole tensors: SGLang's own loader takes this rank's part of each. `control`: of a stream, in which this rank is
    loader number `me`. What the model holds is read back when all of a bucket was loaded.
    """
    if any(bucket.in_place for bucket in buckets):
        return _received(model, buckets)
    own = shards_of(model)
    held = _held(own, buckets)
    apart = {name for name in held if name.endswith(fp8.SCALES)} if scales.lost(model) else set()
    parts: list[tuple[str, list[int], int]] = []
    spent = {"wait": 0.0, "prove": 0.0}

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number, bucket in enumerate(buckets):
            begun = time.perf_counter()
            if control is not None:
                control.wait_written(number + 1)
            found = bucket.views() if bucket.number is None else _inlet.receive(bucket.number)  # type: ignore[union-attr]
            spent["wait"] += time.perf_counter() - begun
            for name, tensor in found.items():
                if name in apart:
                    scales.load(model, name, tensor)
                else:
                    yield name, tensor
            bucket.settle()
            if control is not None:
                control.loaded(me, number + 1)  # SGLang has copied the last tensor when it asks for the next
            begun = time.perf_counter()
            parts.extend((n, held[n].origin, partial(held[n].view, held[n].origin)) for n in bucket.prove)
            spent["prove"] += time.perf_counter() - begun

    begun = time.perf_counter()
    load_weights: Callable[[Any], Any] = model.load_weights  # type: ignore[assignment]
    load_weights(tensors())
    seconds = {"load": time.perf_counter() - begun - sum(spent.values()), "prove": spent["prove"]}
    return {"parts": parts, "expected": list(own), "seconds": seconds}


class _Places(NamedTuple):
    """Where a model has what buckets bring. To find out takes long beside a small model's update, and it seldom changes."""

    addresses: list[tuple[int, torch.Size, tuple[int, ...]]]  # of the model's parameters, with shapes and strides
    tensors: list[tuple[BucketTensor, ...]]  # of the buckets
    parts: dict[str, Part]
    expected: list[str]


def _places(model: torch.nn.Module, buckets: Sequence[BucketSpec]) -> _Places:
    global _known
    addresses = [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in model.parameters()]
    tensors = [tuple(bucket.tensors) for bucket in buckets]
    if _known is None or (_known.addresses, _known.tensors) != (addresses, tensors):
        own = shards_of(model)
        parts = {name: Part(shard.view, shard.origin) for name, shard in _held(own, buckets).items()}
        _known = _Places(addresses, tensors, parts, list(own))
    return _known


def _received(model: torch.nn.Module, buckets: Sequence[BucketSpec]) -> dict[str, Any]:
    """Let messages put their buckets straight into this rank's shards."""
    assert _inlet is not None
    begun, spent, prints = time.perf_counter(), 0.0, []
    places = _places(model, buckets)
    for bucket in buckets:
        _inlet.receive_into(int(bucket.number), places.parts)  # type: ignore[arg-type]
        proving = time.perf_counter()
        for name in bucket.prove:
            view, origin = places.parts[name]
            prints.append((name, origin, partial(view, origin)))
        spent += time.perf_counter() - proving
    seconds = {"load": time.perf_counter() - begun - spent, "prove": spent}
    return {"parts": prints, "expected": places.expected, "seconds": seconds}


def _held(own: dict[str, Shard], buckets: Sequence[BucketSpec]) -> dict[str, Shard]:
    return {item.name: _fitting(own, item) for bucket in buckets for item in bucket.tensors}


def _fitting(own: dict[str, Shard], item: BucketTensor) -> Shard:
    if item.name not in own:
        raise RunError(f"the engine's model has no tensor {item.name}")
    shard = own[item.name].real(item.name, item.shape)
    if str(shard.view.dtype) != f"torch.{item.dtype}":
        raise RunError(f"{item.name} came as {item.dtype}, the engine's model has it as {shard.view.dtype}")
    return shard
