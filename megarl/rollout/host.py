"""The process of one engine: `python -m megarl.rollout.host FD`, started by `megarl.rollout.engine.Engine` and by nothing else.

SGLang kills its parent's whole process tree when a scheduler fails. So the engine lives here, in a session of its own: what
dies with it is this process, and the other end of the socket FD sees that as an end of file. The other way round, when the
other end goes away however suddenly, this process and all that it started are killed at once.

Requests are (method, arguments) for `megarl.rollout.server.Server`; answers are ("ok", value) or ("error", kind, message).
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection, wait
from typing import Any

from megarl.cpu import enter_sglang
from megarl.errors import RunError, UserError
from megarl.rollout import session
from megarl.rollout.arguments import EngineSettings

_PR_SET_PDEATHSIG = 1
_LAST_WORDS = 3.0  # seconds in which SGLang says why


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent is gone (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        os.kill(os.getsid(0), 0)  # the host leads the session; it may have died before the line above
    except ProcessLookupError:
        os._exit(1)


def die_with_other_end(descriptor: int) -> None:
    """Kill this session, and remove its temporary files, as soon as the other end of a socket is closed."""

    def watch() -> None:
        poller = select.poll()
        poller.register(descriptor, select.POLLRDHUP)
        poller.poll()
        shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
        session.remove(session.shared_files(os.getpid()))
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="other-end").start()


def die_with_children() -> None:
    """Kill this session when one of the processes that SGLang has started is gone. SGLang sends this one a signal then, which a main
    thread that waits for an answer of the dead may never come to handle."""
    sentinels = [process.sentinel for process in multiprocessing.active_children()]

    def watch() -> None:
        wait(sentinels)
        time.sleep(_LAST_WORDS)
        os.killpg(os.getpid(), signal.SIGKILL)  # the other end removes files, and reads in the log why

    threading.Thread(target=watch, daemon=True, name="children").start()


def serve(connection: Connection) -> None:
    """Build the server from the first message, then answer one request after the other."""
    server: Any = None

    def start(settings: EngineSettings) -> dict[str, Any]:
        nonlocal server
        from megarl.rollout.server import Server

        server = Server(settings)
        die_with_children()
        return server.info()

    while True:
        answer: tuple[Any, ...]
        try:
            method, arguments = connection.recv()
        except EOFError:  # the end of this process is the other thread's, which has yet to clean up
            threading.Event().wait()
        try:
            answer = ("ok", start(*arguments) if method == "start" else getattr(server, method)(*arguments))
        except UserError as error:
            answer = ("error", "user", str(error))
        except RunError as error:
            answer = ("error", "run", str(error))
        except Exception as error:  # noqa: BLE001  whatever SGLang raises: the caller decides, this process goes on
            import traceback

            traceback.print_exc()
            answer = ("error", "run", f"{type(error).__name__}: {error}")
        connection.send(answer)


def prepare_imports() -> None:
    """What has to happen in each process of an engine before `sglang` is imported."""
    enter_sglang()
    # SGLang's debugging helpers import Megatron wherever it is installed: seconds of start-up and memory for nothing
    sys.modules["megatron.core"] = None  # type: ignore[assignment]


if __name__ == "__mp_main__":  # a process that SGLang spawned: Python imports the parent's main module first
    die_with_parent()
    prepare_imports()

if __name__ == "__main__":
    die_with_other_end(int(sys.argv[1]))
    prepare_imports()
    serve(Connection(int(sys.argv[1])))
