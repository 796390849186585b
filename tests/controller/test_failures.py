"""What goes wrong in a run ends it with exit code 1 and one sentence that says what, and leaves nothing running."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.controller.runs import LEARNABLE, Run

LONG = (*LEARNABLE, "run.steps=1000", "data.eval=null")


def check_failed(run: Run, *words: str) -> None:
    """One sentence with all these words in it, no traceback, nothing left."""
    assert run.code(90) == 1, run.err
    run.gone(15)
    assert len(run.said) == 1, run.err
    for word in words:
        assert word in run.said[0], run.said[0]
    assert "Traceback" not in run.err + run.out
    assert run.leftovers() == []


def check_summary(run: Run) -> None:
    summary = json.loads((run.run_folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert run.said[0] == f"megarl: {summary['error']}"


def test_a_dead_engine(tmp_path: Path) -> None:
    with Run(tmp_path, *LONG) as run:
        run.until(run.steps, 150, "a step")
        run.kill_one("sglang::scheduler")
        check_failed(run, "SGLang engine died", "SIGKILL")
        check_summary(run)
        assert list((run.run_folder / "logs").iterdir())


@pytest.mark.slow
def test_a_dead_engine_actor(tmp_path: Path) -> None:
    with Run(tmp_path, *LONG) as run:
        run.until(run.steps, 150, "a step")
        run.kill_one("ray::Engine")
        check_failed(run, "engine", "died")
        check_summary(run)


@pytest.mark.slow
def test_a_dead_rank(tmp_path: Path) -> None:
    with Run(tmp_path, *LONG) as run:
        run.until(run.steps, 150, "a step")
        run.kill_one("ray::Worker")
        check_failed(run, "trainer rank", "died")
        check_summary(run)


@pytest.mark.slow
def test_an_engine_that_dies_while_it_starts(tmp_path: Path) -> None:
    with Run(tmp_path, *LONG, "rollout.engine={attention_backend: no_such_backend}") as run:
        check_failed(run, "SGLang engine", "no_such_backend")
        check_summary(run)


@pytest.mark.slow
def test_a_scheduler_that_dies_while_it_starts(tmp_path: Path) -> None:
    """More weights than the memory that the scheduler may have."""
    with Run(tmp_path, *LONG, "rollout.engine={load_format: gguf}") as run:
        check_failed(run, "SGLang engine", "starting")
        check_summary(run)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own, as full as it gets."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "megarl-test", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


needs_mount = pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="mounting a small file system needs root",
)
