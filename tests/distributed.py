"""Run a function on a few real ranks, each in its own process, meeting over gloo."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from megarl.roles.ports import unused_port


def free_port() -> int:
    """A port for later use: outside the range from which the system gives ports to whoever connects meanwhile."""
    return unused_port()


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 300) -> list[Any]:
    """`function(rank, world, port, *arguments)` on every rank; the answers by rank. Fails with the first rank's traceback."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_entry, args=(answers, function, rank, world, port, arguments), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    try:
        while len(results) < world:
            rank, ok, value = answers.get(timeout=timeout)
            if not ok:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results[rank] = pickle.loads(value)
    finally:
        for process in processes:
            process.join(10 if len(results) == world else 0)
            process.kill()
    return [results[rank] for rank in range(world)]


def _entry(answers, function, rank: int, world: int, port: int, arguments) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")  # Megatron's, of every rank: they would bury the error that is looked for
    try:
        # Bytes, because a tensor in a queue lives in memory of its sender, which ends before it is read.
        answers.put((rank, True, pickle.dumps(function(rank, world, port, *arguments))))
    except BaseException:
        answers.put((rank, False, traceback.format_exc()))
        raise
