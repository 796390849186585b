"""Runs `megarl` on a terminal of its own, and closes that terminal when it is sent SIGUSR1. What is shown there goes to stdout.
Arguments: megarl's. Ends as megarl does."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys


def main() -> int:
    closing: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: closing.append(number))
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        os.execv(sys.executable, [sys.executable, "-m", "megarl.cli", *sys.argv[1:]])
    while not closing:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                sys.stdout.buffer.write(os.read(terminal, 65536))
            except OSError:  # the command has ended
                break
            sys.stdout.buffer.flush()
    os.close(terminal)  # the kernel sends SIGHUP to all that were started on it
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
