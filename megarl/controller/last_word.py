"""A sentence where the command is ended from outside: by kill -9, by the kernel for want of memory, or by Ray's own code in it, which
ends a process at once and without a word when Ray's object store is gone."""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType
from typing import Self

_SAID = (
    "megarl: the command was ended from outside, before it could say why: by kill -9, by the kernel for want of memory, or by Ray, "
    "when a process of Ray's died; run.resume=auto goes on from the newest checkpoint, if there is one"
)
# Reads until the command has closed its end, as the kernel does for one that is gone. It imports nothing, so it is there at once.
_WATCH = "import sys; sys.stdin.buffer.read() or print(sys.argv[1], file=sys.stderr, flush=True)"


class LastWord:
    """While it is entered another process watches, in a session of its own, which signals to the command's group do not reach."""

    def __enter__(self) -> Self:
        self._watch = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCH, _SAID],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.communicate(b"said")
