"""What goes wrong in a run ends it with exit code 1 and one sentence that says what, and leaves nothing running."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.controller.runs import LEARNABLE, Run

LONG = (*LEARNABLE, "run.steps=1000", "data.eval=null")


def check_failed(run: Run, *words: str, within: float = 90) -> None:
    """One sentence with all these words in it, no traceback, nothing left."""
    assert run.code(within) == 1, run.err
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
    with Run(tmp_path, *LONG, "rollout.max_restarts=0") as run:
        run.until(run.steps, 150, "a step")
        run.kill_one("sglang::scheduler")
        check_failed(run, "SGLang engine died", "SIGKILL")
        check_summary(run)
        assert list((run.run_folder / "logs").iterdir())


@pytest.mark.slow
def test_a_dead_engine_actor(tmp_path: Path) -> None:
    with Run(tmp_path, *LONG, "rollout.max_restarts=0") as run:
        run.until(run.steps, 150, "a step")
        run.kill_one("ray::Engine")
        check_failed(run, "engine", "died")
        check_summary(run)


@pytest.mark.slow
def test_a_dead_rank(tmp_path: Path) -> None:
    with Run(tmp_path, *LONG) as run:
        run.until(run.steps, 150, "a step")
        run.kill_one("ray::Worker")
        check_failed(run, "trainer rank", "died", within=30)  # no hang in a collective with the dead
        check_summary(run)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["gcs_server", "raylet"])
def test_a_dead_part_of_ray(tmp_path: Path, part: str) -> None:
    """But for two small agents of Ray, which look for their cluster for up to a minute, nothing is left."""
    with Run(tmp_path, *LONG) as run:
        run.until(run.steps, 150, "a step")
        run.kill_one(f"{part} --")
        assert run.code(60) == 1, run.err
        assert len(run.said) == 1 and f"Ray's {part} died" in run.said[0] and "Traceback" not in run.err, run.err
        assert run.leftovers() == []
        run.gone(90)
        check_summary(run)


@pytest.mark.slow
def test_a_rank_that_hangs(tmp_path: Path) -> None:
    """Stopped, it cannot say where it stands; the one that waits for it can."""
    with Run(tmp_path, *LONG, "cluster.worker_timeout=60") as run:
        run.until(run.steps, 150, "a step")
        stopped = sorted(pid for pid, name in run.alive().items() if "ray::Worker" in name)[0]
        os.kill(stopped, signal.SIGSTOP)
        check_failed(run, "no answer of trainer rank", "within 60 s", "logs/", within=120)
        check_summary(run)
        stacks = [log for log in (run.run_folder / "logs").iterdir() if "most recent call first" in log.read_text()]
        assert len(stacks) == 1 and "watch.py" in stacks[0].read_text()


@pytest.mark.slow
def test_a_rank_that_raises(tmp_path: Path) -> None:
    """The other rank waits in a collective; the first error is told, and nobody waits for the collective's timeout."""
    reached = tmp_path / "reached"
    with Run(
        tmp_path,
        *LONG,
        "algorithm.policy_loss=tests.controller.hooks.breaking_loss",
        environment={"MEGARL_TEST_REACHED": str(reached)},
    ) as run:
        run.until(reached.exists, 150, "the loss")
        check_failed(
            run, "update: trainer rank 1", "breaking_loss' failed: ArithmeticError: no luck on this rank", within=30
        )
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


@pytest.mark.slow
def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """A limit on the size of files stops what grows fastest, the samples, as a full disk would."""
    with Run(tmp_path, *LONG) as run:
        run.until(run.steps, 150, "a step")
        limit = (run.run_folder / "samples.jsonl").stat().st_size + 16_000
        assert len(run.out) + len(run.err) < limit / 2  # these are files too
        resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (limit, limit))
        check_failed(run, f"cannot write {run.run_folder}/")


@pytest.mark.slow
def test_a_full_disk_at_the_end(tmp_path: Path) -> None:
    """/dev/full says what a full disk says."""
    with Run(tmp_path, *LEARNABLE, "run.steps=1", "data.eval=null") as run:
        run.until(lambda: list(run.root.glob("*/versions.json")), 60, "a run folder")
        (run.run_folder / f".summary.json.{run.pid}.part").symlink_to("/dev/full")
        check_failed(run, "summary.json: the disk is full")
        assert len(run.steps()) == 1


@pytest.mark.slow
def test_a_recording_on_a_full_disk(tmp_path: Path) -> None:
    with Run(tmp_path, *LONG, "rollout.record=/dev/full") as run:
        check_failed(run, "cannot write /dev/full: the disk is full")
        check_summary(run)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """Known before anything is started: bad input, exit code 2."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Run(tmp_path, *LONG, f"cluster.port={port}") as run:
            assert run.finish(60) == 2
            assert f"cluster.port={port} is taken" in run.err and "Traceback" not in run.err
            assert not run.root.exists() and run.leftovers() == []


@pytest.mark.slow
def test_a_port_that_is_taken_while_the_run_starts(tmp_path: Path) -> None:
    """Nobody had it when it was looked at."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        logs = tmp_path / "logs"
        script = (
            "from megarl.cli import guarded\n"
            "from megarl.config.schema import ClusterConfig\n"
            "from megarl.controller.cluster import cluster\n"
            "from pathlib import Path\n"
            "def run():\n"
            f"    with cluster(ClusterConfig(port={port}, object_store_mb=128), Path({str(logs)!r})):\n"
            "        return 0\n"
            "raise SystemExit(guarded('x', run))\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("megarl: ")]
    assert len(said) == 1 and f"port {port}" in said[0]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_node_of_ray_that_dies_while_it_starts(tmp_path: Path) -> None:
    """Nobody waits cluster.worker_timeout for it."""
    script = (
        "import os, signal, threading, time\n"
        "from megarl.cli import guarded\n"
        "from megarl.config.schema import ClusterConfig\n"
        "from megarl.controller.cluster import cluster\n"
        "from pathlib import Path\n"
        "from tests.controller.runs import processes\n"
        "def kill():\n"
        "    while not (found := [pid for pid, title in processes(os.getpid()).items() if 'raylet --' in title]):\n"
        "        time.sleep(0.005)\n"
        "    os.kill(found[0], signal.SIGKILL)\n"
        "def run():\n"
        "    threading.Thread(target=kill, daemon=True).start()\n"
        f"    with cluster(ClusterConfig(object_store_mb=128), Path({str(tmp_path)!r})):\n"
        "        return 0\n"
        "raise SystemExit(guarded('x', run))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 1, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("megarl: ")]
    assert len(said) == 1 and "its raylet died while it started" in said[0]
    assert "Traceback" not in done.stderr
