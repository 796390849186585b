"""The megarl command, of which processes are killed in the middle of stages: `python -m tests.controller.killing train CONFIG ...`.

MEGARL_TEST_KILLS lists STAGE:NUMBER:TITLE, separated by commas, and by semicolons for each time that the run starts in this process:
while it is in STAGE for the NUMBERth time since, kill -9 of the first process below this one whose title holds TITLE, or of itself
(`driver`). TITLE may be N/TITLE: of the Nth engine's processes; and several with a + between them, killed at one time. The moment is
half of what the stage took before; of "checkpoint" it is when a rank's first file is there, whatever stage it is by then. Each kill is
a line in the file MEGARL_TEST_SAID.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl import cli
from megarl.observe.stages import Stages
from tests.controller.runs import processes

DRIVER, BEGINNING, ENGINE = "driver", "start Ray", "ray::Engine"


class Kills:
    """`runs`: the folder of run folders."""

    def __init__(self, listed: str, said: Path, runs: Path):
        self._starts = [[one.split(":", 2) for one in start.split(",") if one] for start in listed.split(";")]
        self._said, self._runs = said, runs

    def _begin(self) -> None:
        listed = self._starts.pop(0) if self._starts else []
        self._left = {(stage, int(number)): titles for stage, number, titles in listed}
        self._seconds: dict[str, list[float]] = {}
        self._before = processes(os.getpid())

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        if stage == BEGINNING:
            self._begin()
        seconds = self._seconds.setdefault(stage, [])
        if titles := self._left.pop((stage, len(seconds) + 1), None):
            later = min(seconds, default=0.0) / 2
            threading.Thread(target=self._kill, args=(stage, titles.split("+"), later), daemon=True).start()
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds.append(time.perf_counter() - start)

    def _kill(self, stage: str, titles: list[str], later: float) -> None:
        pids = [self._find(title) for title in titles]
        if stage == "checkpoint":
            while not list(self._runs.glob("*/checkpoints/.step-*.unfinished/*/*.distcp")):
                time.sleep(0.001)
        else:
            time.sleep(later)
        with self._said.open("a") as file:
            file.writelines(f"{stage} {title} {pid}\n" for title, pid in zip(titles, pids, strict=True))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def _find(self, title: str) -> int:
        if title == DRIVER:
            return os.getpid()
        below = {pid: name for pid, name in processes(os.getpid()).items() if pid not in self._before}
        engine, _, name = title.rpartition("/")
        if engine:
            actor = sorted(pid for pid, title in below.items() if ENGINE in title)[int(engine)]
            below = {actor: below[actor], **processes(actor)}
        return min(pid for pid, title in below.items() if name in title)


def main() -> int:
    runs = [Path(one.removeprefix("run.root=")) for one in sys.argv if one.startswith("run.root=")]
    kills = Kills(os.environ["MEGARL_TEST_KILLS"], Path(os.environ["MEGARL_TEST_SAID"]), runs[-1])
    enter = Stages.__call__

    @contextmanager
    def entered(self: Stages, name: str) -> Iterator[None]:
        with enter(self, name), kills.during(name):
            yield

    Stages.__call__ = entered  # type: ignore[method-assign]
    return cli.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
