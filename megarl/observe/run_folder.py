"""The folder of a run: what it was told, what it measured, what the model said, and what it ran with."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import megarl
from megarl.errors import UserError
from megarl.observe.files import JsonLines, cut_after, to_json, trouble, write_whole, writing
from megarl.observe.tensorboard import TensorBoard

PACKAGES = (
    "torch", "megatron-core", "sglang", "ray", "transformers", "numpy", "omegaconf", "safetensors", "reasoning-gym",
    "transformer-engine", "flash-attn", "sgl-kernel",
)  # fmt: skip

# What lies in a run folder, in the order a person wants it: (name, what it is).
CONTENTS = (
    ("curve.png", "the learning curve"),
    ("summary.json", "the result in numbers"),
    ("metrics.jsonl", "every step's metrics"),
    ("samples.jsonl", "what the model said"),
    ("tensorboard", "the same for TensorBoard"),
    ("config.yaml", "every setting, resolved"),
    ("versions.json", "what it ran with"),
    ("checkpoints", "where it can go on from"),
)


class RunFolder:
    """One run's folder. Every write that fails is a RunError, one sentence naming the file."""

    def __init__(self, path: Path, tensorboard: bool = True):
        """Raises UserError where another process has the folder open."""
        self.path = path
        self._lock = _locked(path)
        self._metrics = JsonLines(path / "metrics.jsonl")
        self._samples = JsonLines(path / "samples.jsonl")
        self._board = TensorBoard(path / "tensorboard") if tensorboard else None

    @classmethod
    def create(cls, root: str | Path, name: str, config: str, tensorboard: bool = True) -> RunFolder:
        """Make ROOT/NAME-YYYYmmdd-HHMMSS, with config.yaml (the text given) and versions.json in it.

        UserError if the folder cannot be made, RunError if a file in it cannot be written.
        """
        path = _make(Path(root).expanduser(), name)
        write_whole(path / "config.yaml", config)
        write_whole(path / "versions.json", to_json(versions(), indent=2) + "\n")
        return cls(path, tensorboard)

    def go_on(self, step: int, config: str) -> list[dict[str, Any]]:
        """Of a run that goes on after `step`: what it holds of later steps is taken away. Answers with the metrics that stay.
        Settings of before are kept beside the present ones where they differ. summary.json goes: the run has not ended any more."""
        with writing(self.path):
            (self.path / "summary.json").unlink(missing_ok=True)
            old = self.path / "config.yaml"
            if old.is_file() and old.read_bytes() != config.encode():
                old.replace(self.path / f"config.until-step-{step}.yaml")
        write_whole(self.path / "config.yaml", config)
        write_whole(self.path / "versions.json", to_json(versions(), indent=2) + "\n")
        cut_after(self.path / "samples.jsonl", step)
        return cut_after(self.path / "metrics.jsonl", step)

    def add_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl and TensorBoard's points of that step."""
        self._metrics.add({"step": step, **metrics})
        if self._board is not None:
            self._board.add(step, metrics)

    def add_samples(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Lines of samples.jsonl (see `conversations.records`), in one write."""
        self._samples.write("".join(to_json(record) + "\n" for record in records).encode())

    def write_summary(self, summary: Mapping[str, Any]) -> Path:
        """summary.json, whole or not at all; written again it replaces the older one."""
        path = self.path / "summary.json"
        write_whole(path, to_json(summary, indent=2) + "\n")
        return path

    def places(self) -> list[tuple[str, Path]]:
        """(what it is, where it lies) of everything that is there."""
        return [(what, self.path / name) for name, what in CONTENTS if (self.path / name).exists()]

    def close(self) -> None:
        """Close the files. Nothing may be added afterwards."""
        self._metrics.close()
        self._samples.close()
        if self._board is not None:
            self._board.close()
        self._lock.close()


def _locked(path: Path) -> BinaryIO:
    """Held until it is closed or the process has ended, however that ended."""
    with writing(path):
        lock = (path / ".lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise UserError(f"{path} is the folder of a run that is going on; wait for its end, or stop it") from error
    return lock


def versions() -> dict[str, Any]:
    """Versions of megarl, of the packages under it and of the machine; the commit where megarl lies in a git checkout."""
    found: dict[str, Any] = {"megarl": megarl.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    found |= {"platform": platform.platform(), "cores": os.cpu_count(), "command": " ".join(sys.argv)}
    return found | _commit(Path(megarl.__file__).parent)


def _commit(folder: Path) -> dict[str, Any]:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "uncommitted_changes": bool(git("status", "--porcelain", "--", ".")),
        }
    except (OSError, subprocess.SubprocessError):  # no git, or no checkout: an installed package has no commit
        return {"commit": None}


def _make(root: Path, name: str) -> Path:
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise UserError(f"run.name must be a plain name, not {name!r}")
    base = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        path = root / (base if number == 1 else f"{base}-{number}")
        try:
            root.mkdir(parents=True, exist_ok=True)
            path.mkdir()
            return path
        except FileExistsError as error:
            if not root.is_dir():
                raise UserError(f"run.root: {root} is not a folder") from error
            number += 1  # another run started in the same second
        except OSError as error:
            raise UserError(f"run.root: {trouble(path, error)}") from error
