"""Waiting for remote calls: a dead or silent process becomes one sentence that says which."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray._private import worker

from megarl.errors import RunError, UserError

T = TypeVar("T")
_LOOK = 2.0  # seconds between two looks at Ray itself
_GRACE = 3.0  # seconds in which a death is known that made another rank's call fail


class ProcessLost(RunError):
    """A process that died, or did not answer in time."""


@dataclass(frozen=True)
class Later(Generic[T]):
    """An answer that is being worked on: the calls are with their processes already, `get` waits for them (once)."""

    get: Callable[[], T]

    def then(self, change: Callable[[T], T]) -> Later[T]:
        """What a function makes of the answer when it is there."""
        return Later(lambda: change(self.get()))


def now(answer: T) -> Later[T]:
    """For who has the answer at once."""
    return Later(lambda: answer)


def all_of(*answers: Later[T]) -> list[T]:
    """Waits for each. All have begun before, and ranks that differ work on theirs beside each other."""
    return [answer.get() for answer in answers]


def wait_for(
    references: Sequence[Any], what: str, timeout: float, process: str, numbers: Sequence[int] | None = None
) -> list[Any]:
    """Results of remote calls, in order. The first failure is raised at once, not after the slowest call.

    `what` is being done by the processes `process` 0, 1, … (a name such as "trainer rank"), one call each; `numbers` where they
    are not all of them.
    Raises RunError when an exception was raised there, ProcessLost when a process died or `timeout` (seconds) passed.
    """
    at = range(len(references)) if numbers is None else numbers
    names = {reference: f"{process} {number}" for number, reference in zip(at, references, strict=True)}
    pending = list(references)
    while pending:
        done: list[Any] = []
        end = time.monotonic() + timeout
        while not done and time.monotonic() < end:
            _check_ray(what)
            done, pending = ray.wait(pending, num_returns=1, timeout=min(_LOOK, timeout))
        if not done:
            silent = " and ".join(names[reference] for reference in pending)
            raise ProcessLost(
                f"{what}: no answer of {silent} within {timeout:.0f} s; where each process stood is in the run folder's logs/"
            )
        try:
            ray.get(done[0])
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RunError | UserError):
                raise error.cause from None
            _raise_death(pending, names, what)  # ranks fail when one of them dies: that one is the cause
            raise RunError(f"{what}: {names[done[0]]}: {type(error.cause).__name__}: {error.cause}") from error
        except ray.exceptions.RayActorError as error:
            _check_ray(what)  # it takes its workers along
            raise _death(error, names[done[0]], what) from error
    return ray.get(list(references))


def put(value: Any, what: str) -> Any:
    """A reference to a value in Ray's object store. Raises the death of a process of Ray's: where Ray finds its store gone before that
    death was seen here, it ends this process without a word."""
    _check_ray(what)
    return ray.put(value)


def _check_ray(what: str) -> None:
    """Raise the death of a process of Ray's own that this one started. Without it calls seem to go on for a minute, and then Ray ends
    the driver without a word."""
    node = worker._global_node
    for kind, _ in node.dead_processes() if node is not None else ():
        if kind in ("gcs_server", "raylet"):
            raise RunError(f"{what}: Ray's {kind} died: it was killed, often for want of memory")


def _raise_death(references: Sequence[Any], names: dict[Any, str], what: str) -> None:
    """Raise the death of the first of the processes that is known to be dead within the grace."""
    if not references:
        return
    done, _ = ray.wait(list(references), num_returns=len(references), timeout=_GRACE)
    for reference in done:
        try:
            ray.get(reference)
        except ray.exceptions.RayActorError as error:
            raise _death(error, names[reference], what) from error
        except ray.exceptions.RayTaskError:  # another one that failed for the same cause
            continue


def _death(error: Exception, name: str, what: str) -> Exception:
    """What ended a process: the error that its start ended in, else what Ray knows."""
    text = str(error)
    for kind in (UserError, RunError):  # raised while an actor was made, they arrive as text
        if found := re.findall(rf"^\S*\b{kind.__name__}: (.+)$", text, re.MULTILINE):
            return kind(found[-1])
    if "its owner has died" in text:  # so Ray says, and the owner is this process: its node is about to end
        return RunError(
            f"{what}: Ray's raylet ended, as it does when one of its agents is killed, and took {name} along"
        )
    if "connection error" in text:
        return ProcessLost(f"{what}: {name} died: it was killed, often for want of memory")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ProcessLost(f"{what}: {name} died: {(lines or ['no reason given'])[-1][:300]}")
