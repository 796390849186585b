"""Where a call that takes too long stands: the stacks of its process, before the controller gives up on it."""

from __future__ import annotations

import faulthandler
import functools
import sys
from typing import Any, TypeVar

C = TypeVar("C", bound=type)
_SHARE = 0.8  # of the time that an answer may take


def watched(cls: C) -> C:
    """Every public method of the class writes the stacks of all threads to the process's error stream, which is kept after a failure,
    when it has run for most of `cluster.worker_timeout`. A thread of C does it, so that it works whatever Python is stuck in."""
    for name, method in list(vars(cls).items()):
        if callable(method) and not name.startswith("_"):
            setattr(cls, name, _watching(method))
    return cls


def _watching(method: Any) -> Any:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if sys.__stderr__ is None:
            return method(self, *arguments, **keywords)
        faulthandler.dump_traceback_later(_SHARE * self.config.cluster.worker_timeout, file=sys.__stderr__)
        try:
            return method(self, *arguments, **keywords)
        finally:
            faulthandler.cancel_dump_traceback_later()

    return call
