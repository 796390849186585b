"""The roles of a rank, of which one works at a time: what the others may leave the device with, they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# What goes to CPU memory, by the setting `offload` of a role.
OFFLOADED = {"none": (), "optimizer": ("gradients", "optimizer"), "all": ("parameters", "gradients", "optimizer")}


class Hosted:
    """Engines by role. A role comes back to the device when it is called, and others leave it then; `rest` sends all away."""

    def __init__(self, engines: Mapping[str, Any], offload: Mapping[str, str]):
        self._engines = dict(engines)
        self._leaves = {name: OFFLOADED[offload[name]] for name in engines}
        self._bytes, self._seconds = 0, 0.0

    @contextmanager
    def looking(self, name: str) -> Iterator[Any]:
        """The engine of a role, with its parameters in place."""
        self._call_in(name, "parameters")
        yield self._engines[name]

    @contextmanager
    def learning(self, name: str, beside: str | None = None) -> Iterator[Any]:
        """The engine of a role, with all that it learns with in place, and the parameters of a second one that it is compared with."""
        self._call_in(name, beside=beside)
        yield self._engines[name]

    def beside(self, name: str) -> Any:
        """The engine of a role that `learning` has left in place."""
        return self._engines[name]

    def rest(self, *, leave: bool = True) -> dict[str, float]:
        """The engines sample now. With `leave`, as they share the device, everything that may leave it does. Answers what was moved,
        there and back, since the last time: `offload/gigabytes`, `offload/seconds`; {} where nothing was."""
        for name in self._engines if leave else ():
            self._send_away(name)
        moved = {"offload/gigabytes": self._bytes / 1e9, "offload/seconds": self._seconds} if self._bytes else {}
        self._bytes, self._seconds = 0, 0.0
        return moved

    def _call_in(self, name: str, *kinds: str, beside: str | None = None) -> None:
        for other in self._engines:
            if other not in (name, beside):
                self._send_away(other)
        if beside is not None:
            self._count(self._engines[beside].memory.restore("parameters"))
        self._count(self._engines[name].memory.restore(*kinds))

    def _send_away(self, name: str) -> None:
        if self._leaves[name]:
            self._count(self._engines[name].memory.offload(*self._leaves[name]))

    def _count(self, moved: Any) -> None:
        self._bytes += moved.total
        self._seconds += moved.seconds if moved.total else 0.0
