"""Run a function on a few real ranks, each in its own process, meeting over gloo.

A process takes seconds to import what a rank needs, so it is kept for the next test that wants one. After a failure all are ended, and
one with many threads is: every process group of gloo that somebody still refers to is a thread that wakes a hundred times a second.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from megarl.roles.ports import unused_port


@dataclass
class _Rank:
    process: Any
    calls: Connection


_idle: list[_Rank] = []
MOST_THREADS = 250
JOBS_A_CALL = 8


def free_port() -> int:
    """A port for later use: outside the range from which the system gives ports to whoever connects meanwhile."""
    return unused_port()


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 300) -> list[Any]:
    """`function(rank, world, port, *arguments)` on every rank; the answers by rank. Fails with the first rank's traceback.

    `timeout` (seconds) bounds the wait for the next answer. What a function builds up it takes down again: its process is used anew.
    """
    while len(_idle) < world:
        _idle.append(_started())
    ranks = _idle[:world]
    port = free_port()
    for number, rank in enumerate(ranks):
        rank.calls.send_bytes(pickle.dumps((function, number, world, port, arguments)))
    results: dict[int, Any] = {}
    try:
        while len(results) < world:
            results |= _next([(n, rank) for n, rank in enumerate(ranks) if n not in results], timeout)
    except BaseException:
        end_ranks()
        raise
    if any(len(list(Path(f"/proc/{rank.process.pid}/task").iterdir())) > MOST_THREADS for rank in ranks):
        end_ranks()
    return [results[number] for number in range(world)]


def run_in_parts(world: int, function: Callable[..., Any], jobs: list[Any], timeout: float = 300) -> list[list[Any]]:
    """`run_ranks` of a function that takes a list of jobs and answers with a list, a few of them at a time."""
    answers: list[list[Any]] = [[] for _ in range(world)]
    for start in range(0, len(jobs), JOBS_A_CALL):
        part = run_ranks(world, function, jobs[start : start + JOBS_A_CALL], timeout=timeout)
        for answer, more in zip(answers, part, strict=True):
            answer += more
    return answers


def outcomes(
    world: int, function: Callable[..., Any], jobs: Mapping[Any, Any], outcome: Callable[[Any, list[Any]], Any]
) -> dict[Any, Any]:
    """`run_in_parts` of named jobs: by name, what `outcome` makes of a job and of its answers by rank."""
    answers = run_in_parts(world, function, list(jobs.values()))
    return {key: outcome(job, [rank[at] for rank in answers]) for at, (key, job) in enumerate(jobs.items())}


def end_ranks() -> None:
    """End all processes that are kept."""
    while _idle:
        rank = _idle.pop()
        rank.process.kill()
        rank.process.join()


def _next(waiting: list[tuple[int, _Rank]], timeout: float) -> dict[int, Any]:
    """Answers that have come. The first failure is the cause of the others'."""
    ready = wait([rank.calls for _, rank in waiting], timeout)
    if not ready:
        raise AssertionError(f"no answer of ranks {[number for number, _ in waiting]} within {timeout:.0f} s")
    found = {}
    failed: list[tuple[float, int, str]] = []
    for number, rank in waiting:
        if rank.calls not in ready:
            continue
        try:
            when, ok, value = pickle.loads(rank.calls.recv_bytes())
        except EOFError:
            rank.process.join()
            when, ok, value = 0.0, False, f"the process ended with exit code {rank.process.exitcode}"
        if ok:
            found[number] = value
        else:
            failed.append((when, number, value))
    if failed:
        _, number, value = min(failed)
        raise AssertionError(f"rank {number} failed:\n{value}")
    return found


def _started() -> _Rank:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return _Rank(process, ours)


def _serve(calls: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")  # Megatron's, of every rank: they would bury the error that is looked for
    while True:
        try:
            function, rank, world, port, arguments = pickle.loads(calls.recv_bytes())
        except EOFError:  # the tests have ended
            return
        try:
            answer = (time.monotonic(), True, function(rank, world, port, *arguments))
        except BaseException:
            calls.send_bytes(pickle.dumps((time.monotonic(), False, traceback.format_exc())))
            raise
        calls.send_bytes(pickle.dumps(answer))


atexit.register(end_ranks)
