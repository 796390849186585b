"""Runs of the real command, watched from outside: output, exit code, processes, and what they leave on the machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONFIG = "configs/tiny.yaml"
# Random weights answer no sum: a reward that every response earns another share of, so that there is something to learn.
LEARNABLE = ("reward.name=tests.controller.hooks.share_of_vowels", "algorithm.entropy_coefficient=0.01")


class Run:
    """A started `megarl train`. Its temporary files lie in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        config: str = CONFIG,
        environment: dict[str, str] | None = None,
        module: str = "megarl.cli",
    ):
        self.folder = folder
        self.root = folder / "runs"
        self.scratch = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # short: sockets lie in it
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", module, "train", config, f"run.root={self.root}", *overrides]
        self.begun = time.monotonic()
        self._reaper = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("reaper.py")), str(folder), *command],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(self.scratch), **(environment or {})},
        )
        self.until(lambda: (folder / "pid").is_file() and (folder / "pid").read_text(), 20, "a process")
        self.pid = int((folder / "pid").read_text())

    # ---- what it says

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    @property
    def said(self) -> list[str]:
        """Lines of megarl's own on the error stream; libraries may warn there too."""
        return [line for line in self.err.splitlines() if line.startswith("megarl: ")]

    @property
    def run_folder(self) -> Path:
        (found,) = self.root.iterdir()
        return found

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_folder / name).read_text().split("\n") if line]

    def steps(self) -> list[dict[str, Any]]:
        """metrics.jsonl without evaluations, of the last run in this root; empty before there is one."""
        files = sorted(self.root.glob("*/metrics.jsonl"))
        rows = [json.loads(line) for line in files[-1].read_text().split("\n") if line] if files else []
        return [row for row in rows if "reward/mean" in row]

    def metrics(self, step: int) -> dict[str, Any]:
        return self.steps()[step - 1]

    # ---- how it ends

    def until_said(self, timeout: float) -> None:
        """Wait for a line of megarl's own on the error stream, which may come after the end."""
        end = time.monotonic() + timeout
        while not self.said and time.monotonic() < end:
            time.sleep(0.05)

    def until(self, condition: Callable[[], Any], timeout: float, what: str) -> None:
        """Wait for a condition; fails when it has not come true in time, or the run ended before it did."""
        end = time.monotonic() + timeout
        while not condition():
            ended = (self.folder / "code").is_file()
            if ended or time.monotonic() > end:
                state = "the run ended" if ended else "nothing happened"
                self.stop()
                raise AssertionError(f"{state} before there was {what}:\n{self.out[-2000:]}\n{self.err[-3000:]}")
            time.sleep(0.05)

    def code(self, timeout: float) -> int:
        """The exit code, waited for."""
        end = time.monotonic() + timeout
        while not (self.folder / "code").is_file():
            if time.monotonic() > end:
                alive = self.alive()
                self.stop()
                raise AssertionError(
                    f"no end after {timeout} s; alive: {alive}\n{self.out[-2000:]}\n{self.err[-3000:]}"
                )
            time.sleep(0.05)
        return int((self.folder / "code").read_text())

    def gone(self, timeout: float) -> None:
        """Fails unless every process of the run has ended within `timeout` seconds."""
        try:
            self._reaper.wait(timeout)
        except subprocess.TimeoutExpired:
            alive = self.alive()
            self.stop()
            raise AssertionError(f"alive after {timeout} s: {alive}") from None

    def finish(self, timeout: float = 200) -> int:
        code = self.code(timeout)
        self.gone(15)
        return code

    def signal(self, number: int, *, group: bool = True) -> None:
        """To the process group, as a terminal sends Ctrl-C, or to the command alone."""
        (os.killpg if group else os.kill)(self.pid, number)

    def leftovers(self) -> list[str]:
        """Files of the run outside its folder."""
        own = [*Path("/dev/shm").glob(f"megarl-{self.pid}-*"), *Path("/tmp").glob(f"megarl-ray-{self.pid}-*")]
        return [str(path) for path in (*own, *self.scratch.glob("megarl-*"))]

    def stop(self) -> None:
        """End whatever is left, and forget its temporary files."""
        while self._reaper.poll() is None:
            for pid in processes(self._reaper.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        shutil.rmtree(self.scratch, ignore_errors=True)

    # ---- its processes

    def alive(self) -> dict[int, str]:
        """pid -> title of every process below the command's starter."""
        return processes(self._reaper.pid)

    def kill_one(self, title: str) -> int:
        """kill -9 of the first process whose title holds `title`; its pid."""
        found = sorted(pid for pid, name in self.alive().items() if title in name)
        assert found, f"no process {title!r} among {self.alive()}"
        os.kill(found[0], signal.SIGKILL)
        return found[0]

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def processes(ancestor: int) -> dict[int, str]:
    """pid -> title of all living descendants."""
    parents: dict[int, int] = {}
    titles: dict[int, str] = {}
    for pid, fields in _stat():
        if fields[0] not in "ZX":
            parents[pid] = int(fields[1])
            with contextlib.suppress(OSError):
                titles[pid] = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")[:160].strip()
    found: dict[int, str] = {}
    for pid in parents:
        at = pid
        while at in parents and at != ancestor:
            at = parents[at]
        if at == ancestor and pid != ancestor:
            found[pid] = titles.get(pid, "")
    return found


def _stat() -> Iterator[tuple[int, list[str]]]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended while we looked
                yield int(entry.name), Path(entry.path, "stat").read_text().rpartition(")")[2].split()
