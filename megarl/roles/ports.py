"""A port that ranks can meet at."""

from __future__ import annotations

import random
import socket

# Below what Linux hands out to outgoing connections (from 32768 on): nobody gets it by chance before it is used.
_RANGE = range(20000, 32000)
_given: set[int] = set()


def unused_port() -> int:
    """A TCP port that nobody listens at now, on any address of this host; never the same twice. OSError where there is none."""
    for port in random.SystemRandom().sample(_RANGE, 200):
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise OSError(f"no free port found between {_RANGE.start} and {_RANGE.stop}")
