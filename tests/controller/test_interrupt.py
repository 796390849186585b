"""Ctrl-C, SIGTERM and kill -9 at every stage: nothing of a run outlives it, and its folder stays readable."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.controller.runs import LEARNABLE, Run

GONE = 10.0  # seconds, from the signal to the end of the last process
LONG = (*LEARNABLE, "run.steps=1000")
SLOW_SAMPLING = ("rollout.max_new_tokens=380", "rollout.n=32", "rollout.max_total_tokens=65536")


def started(run: Run) -> bool:
    """The cluster is up and the parts are being built."""
    return any("ray::Worker" in title for title in run.alive().values())


def steps(run: Run, count: int) -> bool:
    return len(run.steps()) >= count


def evaluated(run: Run) -> bool:
    return any(path.read_text() for path in run.root.glob("*/metrics.jsonl"))


def computing(run: Run) -> list[str]:
    """Everything but two small agents of Ray, which look for their dead cluster for up to a minute before they end."""
    return [title for title in run.alive().values() if title not in ("ray::DashboardAgent", "ray::RuntimeEnvAgent")]


def ended_by(run: Run, number: int) -> int:
    """Send a signal; the exit code, once every process has gone in time.

    Ctrl-C goes to the whole process group, as a terminal sends it, SIGTERM to the command alone, as `kill` does.
    """
    sent = time.monotonic()
    run.signal(number, group=number == signal.SIGINT)
    code = run.code(GONE)
    run.gone(max(0.1, GONE - (time.monotonic() - sent)))
    return code


def check_interrupted(run: Run) -> None:
    assert run.leftovers() == []
    assert run.said == ["megarl: interrupted"] and "Traceback" not in run.err + run.out
    folder = run.run_folder
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    for name in ("metrics.jsonl", "samples.jsonl"):
        run.lines(name)  # whole lines only


@pytest.mark.slow
@pytest.mark.parametrize("live", ["true", "false"])
def test_a_closed_terminal_ends_a_run_in_order_and_saved(tmp_path: Path, live: str) -> None:
    """The kernel tells everything that was started there, and nothing can be printed any more."""
    settings = ("checkpoint.every=100", f"observe.progress={live}")
    with Run(tmp_path, *LONG, *settings, module="tests.controller.on_terminal") as run:
        run.until(lambda: steps(run, 2), 150, "two steps")
        run.signal(signal.SIGUSR1, group=False)
        assert run.code(60) == 130
        run.gone(GONE)
        saved = int((run.run_folder / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))
        summary = json.loads((run.run_folder / "summary.json").read_text())
        assert saved == len(run.steps()) == summary["steps"]
        assert summary["error"] == f"told to end (SIGHUP) after step {saved}"


def test_ctrl_c_between_steps_and_a_new_run(tmp_path: Path) -> None:
    with Run(tmp_path / "first", *LONG) as run:
        run.until(lambda: steps(run, 2), 150, "two steps")
        assert ended_by(run, signal.SIGINT) == 130
        check_interrupted(run)
        assert json.loads((run.run_folder / "summary.json").read_text())["steps"] >= 2
    with Run(tmp_path / "second", *LEARNABLE, "run.steps=1", "evaluation.every=0") as run:
        assert run.finish() == 0
        assert run.leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_starting(tmp_path: Path, number: int) -> None:
    with Run(tmp_path, *LONG) as run:
        run.until(lambda: started(run), 60, "a worker")
        time.sleep(1.0)
        assert ended_by(run, number) == 130
        check_interrupted(run)


@pytest.mark.slow
def test_before_anything_is_started(tmp_path: Path) -> None:
    with Run(tmp_path, *LONG) as run:
        time.sleep(1.0)  # imports
        assert ended_by(run, signal.SIGINT) == 130
        assert run.said == ["megarl: interrupted"] and "Traceback" not in run.err
        assert not run.root.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_sampling(tmp_path: Path, number: int) -> None:
    with Run(tmp_path, *LONG, *SLOW_SAMPLING, "evaluation.max_new_tokens=4") as run:
        run.until(lambda: evaluated(run), 150, "the first evaluation")
        time.sleep(1.0)
        assert not steps(run, 1)
        assert ended_by(run, number) == 130
        check_interrupted(run)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["reward", "policy_loss"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_inside_a_function_of_the_user(tmp_path: Path, stage: str, number: int) -> None:
    """In the driver's process (a reward) and in the ranks' (a loss, in the middle of Megatron's update)."""
    name = {"reward": "reward.name", "policy_loss": "algorithm.policy_loss"}[stage]
    hook = {"reward": "waiting_reward", "policy_loss": "waiting_loss"}[stage]
    reached = tmp_path / "reached"
    overrides = (*LONG, f"{name}=tests.controller.hooks.{hook}", "data.eval=null")
    with Run(tmp_path, *overrides, environment={"MEGARL_TEST_REACHED": str(reached)}) as run:
        run.until(reached.exists, 150, f"a call of {hook}")
        assert ended_by(run, number) == 130
        check_interrupted(run)


@pytest.mark.slow
@pytest.mark.parametrize("later", [0.0, 0.17, 0.34, 0.51, 0.68])
def test_ctrl_c_anywhere_in_a_step(tmp_path: Path, later: float) -> None:
    """More than half of a step of this model is resharding."""
    with Run(tmp_path, *LONG) as run:
        run.until(lambda: steps(run, 1), 150, "a step")
        time.sleep(later)
        assert ended_by(run, signal.SIGINT) == 130
        check_interrupted(run)


@pytest.mark.slow
def test_ctrl_c_twice(tmp_path: Path) -> None:
    """The second one comes while the run cleans up."""
    with Run(tmp_path, *LONG) as run:
        run.until(lambda: steps(run, 1), 150, "a step")
        run.signal(signal.SIGINT)
        time.sleep(0.5)
        assert ended_by(run, signal.SIGINT) == 130
        assert run.leftovers() == []
        assert "Traceback" not in run.err


@pytest.mark.slow
def test_sigterm_between_steps(tmp_path: Path) -> None:
    with Run(tmp_path, *LONG) as run:
        run.until(lambda: steps(run, 1), 150, "a step")
        assert ended_by(run, signal.SIGTERM) == 130
        check_interrupted(run)


@pytest.mark.slow
def test_kill_of_the_command(tmp_path: Path) -> None:
    """Nobody can clean up: processes end by themselves, files go with the next run."""
    with Run(tmp_path / "first", *LONG) as run:
        run.until(lambda: steps(run, 1), 150, "a step")
        run.signal(signal.SIGKILL, group=False)
        assert run.code(5) == 128 + signal.SIGKILL
        run.until_said(10)
        (said,) = run.said
        assert "ended from outside" in said and "run.resume=auto" in said
        end = time.monotonic() + 20
        while computing(run) and time.monotonic() < end:
            time.sleep(0.1)
        assert not computing(run)
        run.gone(90)
        run.lines("metrics.jsonl")
        left = run.leftovers()
        assert left
        with Run(tmp_path / "second", *LEARNABLE, "run.steps=1", "data.eval=null") as following:
            assert following.finish() == 0
        assert not [path for path in left if Path(path).exists() and str(run.scratch) not in path]
