"""Trainer ranks that write buckets when they are told to, each in its own process."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.bridge.layout import Copy
from megarl.reshard import devices
from megarl.reshard.bucket import BucketSpec
from megarl.reshard.exposure import Exposure
from megarl.reshard.link import Meeting, Outlet, Regions
from megarl.reshard.stream import Stream
from megarl.reshard.transfer import Member
from tests.distributed import free_port
from tests.reshard import host_device  # noqa: F401  a kind of device that is here

LAYOUTS = {"tp2": {"tensor": 2}, "pp2": {"pipeline": 2}, "dp2": {"data": 2}, "ep2": {"data": 2, "expert": 2}}
# biases; tied with a copy on the last stage; norms of queries and keys; experts
FAMILY = {"tp2": "qwen2-untied", "pp2": "qwen2", "dp2": "qwen3", "ep2": "qwen3-moe", "fused": "gpt-oss"}
FUSED = {"fused": {"data": 2, "expert": 2}}  # a layer's experts in one tensor, transposed, rows of gate and up by turns


class Ranks:
    """The trainer's side of a transfer, over pipes: what the controller's worker group is over Ray."""

    def __init__(self, folder: Path, *, tensor: int = 1, pipeline: int = 1, data: int = 1, expert: int = 1):
        context = multiprocessing.get_context("spawn")
        world, port = tensor * pipeline * data, free_port()
        self._pipes, self._processes = [], []
        self.gave_up: list[str] = []  # why ranks did not join, the last time that they did not
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world, port, str(folder), tensor, pipeline, expert)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()

    def write(self, bucket: BucketSpec) -> list[dict[str, int]]:
        return self._all("write", bucket)

    def shares(self, kinds: Mapping[str, str]) -> list[dict[str, int]]:
        return self._all("shares", dict(kinds))

    def pieces(self, bucket: BucketSpec) -> list[list[tuple[Copy, torch.Tensor]]]:
        return self._all("pieces", bucket)

    def __len__(self) -> int:
        return len(self._pipes)

    def measure(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self._all("measure", dict(shapes))

    def write_stream(self, stream: Stream) -> list[dict[str, int]]:
        return self._all("write_stream", stream)

    def offer(self, kind: str, paths: Sequence[str], size: int) -> list[str]:
        return self._all("offer", kind, list(paths), size)

    def open(self, engines: Mapping[Member, Sequence[Exposure]]) -> list[dict[Member, int]]:
        return self._all("open", dict(engines))

    def write_in_place(self, members: Sequence[Member]) -> None:
        self._all("write_in_place", list(members))

    def regions(self) -> list[Regions]:
        return self._all("regions")

    def link(self, meeting: Meeting) -> None:
        for pipe in self._pipes:
            pipe.send(("link", (meeting,)))

    def linked(self, token: None, wait: float) -> bool:
        if not all(pipe.poll(wait) for pipe in self._pipes):
            return False
        refused = [why for why in self._answers() if why]
        assert not refused, refused
        return True

    def unlink(self, token: None) -> None:
        self.gave_up = self._answers()

    def send(self, buckets: Sequence[BucketSpec]) -> list[dict[str, int]]:
        return self._all("send", list(buckets))

    def change(self) -> None:
        """Every weight gets another value, as after an update."""
        self._all("change")

    def restore(self) -> None:
        """Back to the checkpoint's weights; nothing is frozen."""
        self._all("restore")

    def freeze(self, rank: int, name: str) -> None:
        """From now on the rank writes what the named tensor is now, while its weights go on."""
        self._pipes[rank].send(("freeze", (name,)))
        self._answer(rank)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((method, arguments))
        return self._answers()

    def _answers(self) -> list[Any]:
        return [self._answer(rank) for rank in range(len(self._pipes))]

    def _answer(self, rank: int) -> Any:
        assert self._pipes[rank].poll(120), f"rank {rank} does not answer"
        ok, value = self._pipes[rank].recv()
        assert ok, f"rank {rank}:\n{value}"
        return value


def _serve(pipe: Any, rank: int, world: int, port: int, folder: str, tensor: int, pipeline: int, expert: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        server = _Server(rank, world, port, folder, tensor, pipeline, expert)
        pipe.send((True, None))
        while True:
            method, arguments = pipe.recv()
            pipe.send((True, getattr(server, method)(*arguments)))
    except EOFError:
        server.stop()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise


class _Server:
    def __init__(self, rank: int, world: int, port: int, folder: str, tensor: int, pipeline: int, expert: int):
        from megarl.megatron import parallel
        from megarl.megatron.engine import EngineSettings, MegatronEngine
        from megarl.reshard.writer import ShardWriter

        layout = {"tensor": tensor, "pipeline": pipeline, "expert": expert}
        place = parallel.start(rank, world, "127.0.0.1", port, **layout, seed=1, timeout=60)
        self.engine = MegatronEngine(Path(folder), place, EngineSettings("float32"))
        self.writer = ShardWriter(self.engine.parameters(), place)
        self.stop = parallel.stop
        self._rank = rank
        self._first = [tensor.detach().clone() for _, tensor in self.engine.parameters()]
        self._frozen: dict[str, list[Any]] = {}

    def pieces(self, bucket: BucketSpec) -> list[tuple[Copy, torch.Tensor]]:
        return self.writer.pieces(bucket)

    def regions(self) -> Regions:
        return self.writer.regions()

    def offer(self, kind: str, paths: list[str], size: int) -> str:
        return devices.offer(kind, paths, size)

    def measure(self, shapes: dict[str, Sequence[int]]) -> None:
        self.writer.measure(shapes, lambda found: dist.all_reduce(found, dist.ReduceOp.MAX))

    def open(self, engines: dict[Member, list[Exposure]]) -> dict[Member, int]:
        return self.writer.open(engines)

    def write_in_place(self, members: list[Member]) -> None:
        """What is frozen is not written."""
        engines = self.writer._engines
        self.writer._engines = {
            member: opened._replace(pairs={n: p for n, p in opened.pairs.items() if n not in self._frozen})
            for member, opened in engines.items()
        }
        try:
            self.writer.write_in_place(members)
        finally:
            self.writer._engines = engines

    def link(self, meeting: Meeting) -> str:
        """Why it could not; empty where it could."""
        try:
            self._outlet = Outlet(meeting, self._rank, self.regions())
        except RuntimeError as error:
            return str(error)
        return ""

    def send(self, buckets: list[BucketSpec]) -> dict[str, int]:
        """With what is frozen in the place of the weights, but not in that of their fingerprints."""
        outlet = self._outlet

        class Stale:
            flush = outlet.flush

            @staticmethod
            def send(tensors: Any, slices: dict[str, Any]) -> None:
                outlet.send(
                    tensors, slices | {n: [old for _, old in held] for n, held in self._frozen.items() if n in slices}
                )

        return self.writer.send(buckets, Stale)  # type: ignore[arg-type]

    def write_stream(self, stream: Stream) -> dict[str, int]:
        copy = self.writer._copy

        def stale(bucket: BucketSpec, pieces: Any) -> None:
            copy(bucket, pieces)
            self._spoil(bucket)

        self.writer._copy = stale  # type: ignore[method-assign]
        try:
            return self.writer.write_stream(stream, self._rank)
        finally:
            self.writer._copy = copy  # type: ignore[method-assign]

    def write(self, bucket: BucketSpec) -> dict[str, int]:
        shares = self.writer.write(bucket)
        self._spoil(bucket)
        return shares

    def _spoil(self, bucket: BucketSpec) -> None:
        for name, whole in bucket.views().items():
            for region, old in self._frozen.get(name, ()):
                whole[region].copy_(old)

    def shares(self, kinds: dict[str, str]) -> dict[str, int]:
        return self.writer.shares(kinds)

    def restore(self) -> None:
        self._frozen = {}
        for (_, tensor), first in zip(self.engine.parameters(), self._first, strict=True):
            tensor.data.copy_(first)

    def change(self) -> None:
        for _, tensor in self.engine.parameters():
            tensor.data.add_(tensor.data.roll(1, 0), alpha=0.5)

    def freeze(self, name: str) -> None:
        pieces = self.writer._slices[name]
        self._frozen[name] = [(p.copy.hf, p.tensor[p.copy.local].clone()) for p in pieces]
