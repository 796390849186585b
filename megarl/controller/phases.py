"""Stages of a step with the memory that was held in each: at its highest, by ranks and by engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from megarl.controller.engines import EngineGroup
from megarl.controller.workers import WorkerGroup
from megarl.observe.stages import Stages

FIRST = "rollout"  # of a step
ALONE = "advantages"  # ranks and engines have nothing to do
_GB = 1e9


class Phases:
    """`with phases("update"): ...` is the stage of that name; afterwards `peaks` knows the memory that it took."""

    def __init__(self, stages: Stages, ranks: Iterable[WorkerGroup], engines: EngineGroup):
        self._stages = stages
        self._ranks = list(ranks)
        self._engines = engines
        self._peaks: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with self._stages(name):
            if name == FIRST:
                self._measure()  # evaluations, checkpoints: no part of a step
            yield
            if name != ALONE:
                peaks = {f"memory/{name}_{who}_peak_gb": held / _GB for who, held in self._measure().items()}
                self._peaks |= peaks

    def collect(self) -> dict[str, float]:
        """A step's seconds by stage (`Stages.collect`)."""
        return self._stages.collect()

    def peaks(self) -> dict[str, float]:
        """`memory/<stage>_ranks_peak_gb`, `memory/<stage>_engines_peak_gb` of a step: of the rank, and of the engine with all its
        processes, that held most."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    def _measure(self) -> dict[str, int]:
        """Bytes since the last time."""
        found = {
            "ranks": [held for group in self._ranks for held in group.peak_memory()],
            "engines": self._engines.peak_memory(),
        }
        return {who: max(held) for who, held in found.items() if held}
