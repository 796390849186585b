"""Waiting for remote calls: a dead or silent process becomes one sentence that says which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from megarl.errors import RunError, UserError


def wait_for(references: Sequence[Any], what: str, timeout: float) -> list[Any]:
    """Results of remote calls, in order. The first failure is raised at once, not after the slowest call.

    Raises RunError when a process died, an exception was raised there, or `timeout` (seconds) passed.
    """
    pending = list(references)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=timeout)
        if not done:
            raise RunError(f"{what}: no answer within {timeout:.0f} s")
        _result(done[0], what)
    return [_result(reference, what) for reference in references]


def _result(reference: Any, what: str) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, (RunError, UserError)):
            raise cause from None
        raise RunError(f"{what}: {type(cause).__name__}: {cause}") from error
    except ray.exceptions.RayActorError as error:
        raise RunError(f"{what}: the process died ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    exits = [line for line in lines if "exit" in line.lower() or "killed" in line.lower()]
    return (exits or lines or ["no reason given"])[-1][:300]
