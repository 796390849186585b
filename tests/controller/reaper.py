"""Starts a command as a terminal would, in a session of its own, and adopts whatever it leaves behind.

Usage: reaper.py FOLDER COMMAND... It writes FOLDER/pid, FOLDER/code when the command has ended (128 + signal where one killed it), and
ends when no descendant of the command is left, however deeply forked and detached. So its end is the proof that all are gone.
When the test run that started it dies, it kills the command.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def kill(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        child = subprocess.Popen(sys.argv[2:], stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True)
    signal.signal(signal.SIGTERM, kill)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    (folder / "pid").write_text(str(child.pid))
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            break
        if pid == child.pid:
            code = os.waitstatus_to_exitcode(status)
            (folder / "code.part").write_text(str(code if code >= 0 else 128 - code))
            (folder / "code.part").rename(folder / "code")
