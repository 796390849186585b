"""Trainer ranks that write buckets when they are told to, each in its own process."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.reshard.bucket import BucketSpec
from tests.distributed import free_port


class Ranks:
    """The trainer's side of a transfer, over pipes: what the controller's worker group is over Ray."""

    def __init__(self, folder: Path, *, tensor: int = 1, pipeline: int = 1, data: int = 1):
        context = multiprocessing.get_context("spawn")
        world, port = tensor * pipeline * data, free_port()
        self._pipes, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world, port, str(folder), tensor, pipeline)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()

    def write(self, bucket: BucketSpec) -> None:
        self._all("write", bucket)

    def fingerprints(self, names: Sequence[str], dtype: str) -> list[dict[str, int]]:
        return self._all("fingerprints", list(names), dtype)

    def change(self, rank: int) -> None:
        """Every weight of a rank gets another value, as after an update."""
        self._pipes[rank].send(("change", ()))
        self._answer(rank)

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


def _serve(pipe: Any, rank: int, world: int, port: int, folder: str, tensor: int, pipeline: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        server = _Server(rank, world, port, folder, tensor, pipeline)
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
    def __init__(self, rank: int, world: int, port: int, folder: str, tensor: int, pipeline: int):
        from megarl.megatron import parallel
        from megarl.megatron.engine import EngineSettings, MegatronEngine
        from megarl.reshard.writer import ShardWriter

        place = parallel.start(rank, world, "127.0.0.1", port, tensor=tensor, pipeline=pipeline, seed=1, timeout=60)
        self.engine = MegatronEngine(Path(folder), place, EngineSettings("float32"))
        self.writer = ShardWriter(self.engine.parameters(), place)
        self.stop = parallel.stop
        self._frozen: dict[str, list[Any]] = {}

    def write(self, bucket: BucketSpec) -> None:
        self.writer.write(bucket)
        for name, whole in bucket.views().items():
            for region, old in self._frozen.get(name, ()):
                whole[region].copy_(old)

    def fingerprints(self, names: list[str], dtype: str) -> dict[str, int]:
        return self.writer.fingerprints(names, dtype)

    def change(self) -> None:
        for _, tensor in self.engine.parameters():
            tensor.data.add_(tensor.data.roll(1, 0), alpha=0.5)

    def freeze(self, name: str) -> None:
        pieces = self.writer._slices[name]
        self._frozen[name] = [(p.copy.hf, p.tensor[p.copy.local].clone()) for p in pieces]
