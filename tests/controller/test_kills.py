"""kill -9 of a process in the middle of every stage, one after the other: a run ends as one that nobody killed, to the
last bit of its weights, optimizer and metrics. The short form is in test_resume.py.

What ends a run (the command, a rank, Ray's own processes) is killed while its engine is a server that outlives it: the run goes on
from its newest checkpoint, by itself or started again. What an engine consists of is killed in a run that goes on without an end; its
engines say what the server said, to the last bit, since both sample one response at a time.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megarl.models.tiny import make_tiny
from tests.controller.killing import DRIVER, ENGINE
from tests.controller.runs import LEARNABLE, Run
from tests.controller.servers import Server
from tests.controller.test_resume import check_same, numbers, started

STAGES = ("rollout", "score", "log_probs", "advantages", "update", "reshard", "evaluate", "checkpoint")
ENDING = {"driver": DRIVER, "rank": "ray::Worker", "raylet": "raylet --", "gcs": "gcs_server --"}
# An engine's: its actor, the host of SGLang, SGLang's scheduler. Each of another engine's, which are lost at one time.
ENGINES = "+".join(f"{at}/{title}" for at, title in enumerate((ENGINE, "megarl.rollout.host", "sglang::scheduler")))
# Nobody needs them: who reads Ray's logs, its dashboard and its autoscaler, and who tidies up after an engine.
BYSTANDERS = "_private/log_monitor+dashboard/dashboard.py+autoscaler/_private+resource_tracker"
# By the step in which engines are killed: all are back before the next kill.
LOSSES = {
    2: "score",
    3: "log_probs",
    4: "advantages",
    5: "update",
    6: "reshard",
    8: "rollout",
    9: "evaluate",
    10: "checkpoint",
}
STEPS = max(LOSSES) + 2
SETTINGS = (*LEARNABLE, "rollout.n=4", "data.eval.size=3", "evaluation.every=1", "observe.progress=false")
SETTINGS = (*SETTINGS, f"run.steps={STEPS}", "checkpoint.every=1")
PATIENCE = 600.0  # seconds, of a start on a machine that does much else

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class Whole:
    """An uninterrupted run with a server as its engine, and its samples."""

    def __init__(self, folder: Path, model: Path, server: Server):
        self.settings = (*SETTINGS, f"model.path={model}")
        named = ("reshard.transport=disk", "rollout.max_total_tokens=null", f"rollout.urls=[{server.url}]")
        recording = folder / "rollouts.jsonl"
        with Run(folder, *self.settings, *named, f"rollout.record={recording}") as run:
            assert run.code(PATIENCE) == 0, run.err[-3000:]
            self.folder = run.run_folder
        self.replayed = (*self.settings, *named, f"rollout.replay={recording}", "run.resume=auto")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    folder = tmp_path_factory.mktemp("whole")
    model = make_tiny("qwen3", folder / "qwen3")
    with Server(model, folder / "log", "--disable-radix-cache", "--max-running-requests", "1") as server:
        yield Whole(folder / "run", model, server)


@dataclass(frozen=True)
class Part:
    """A process of a run that goes on. `kills`: for each time that it starts in it, where it is killed."""

    kills: tuple[str, ...]
    code: int  # that it ends with
    settings: tuple[str, ...] = ()


def parts(kind: str) -> list[Part]:
    """Of a run in which a kind of process is killed in every stage, each time in the second step since the start."""
    in_step = tuple(f"{stage}:2:{ENDING[kind]}" for stage in STAGES[:-1])
    saving = f"checkpoint:3:{ENDING[kind]}"  # begun, waited for, and the second one begun
    beside = ("checkpoint.asynchronous=true",)
    if kind in ("driver", "raylet"):
        code = 128 + signal.SIGKILL if kind == "driver" else 1
        one_by_one = [Part((kill,), code) for kill in (*in_step, saving)]
        return [*one_by_one, Part((saving,), code, beside), Part((), 0)]
    return [
        Part((*in_step, saving), 1, (f"run.max_restarts={len(in_step)}",)),
        Part((saving,), 0, (*beside, "run.max_restarts=1")),
    ]


def killed(run: Run) -> int:
    said = run.folder / "kills"
    return len(said.read_text().splitlines()) if said.exists() else 0


@pytest.mark.parametrize("kind", ENDING)
def test_killed_in_every_stage_and_gone_on(kind: str, whole: Whole, tmp_path: Path) -> None:
    for number, part in enumerate(parts(kind)):
        settings = (*whole.replayed, *part.settings, f"run.root={tmp_path / 'runs'}")
        with started(tmp_path / str(number), part.kills, *settings) as run:
            code = run.code(PATIENCE * (1 + len(part.kills)))
            told = f"{part}: {code}\n{run.out[-3000:]}\n{run.err[-3000:]}"
            assert code == part.code and killed(run) == len(part.kills), told
            if code:  # a command that is killed is told of by who watches it
                run.until_said(10)
            assert len(run.said) == (code != 0) and "Traceback" not in run.err, told
        (folder,) = (tmp_path / "runs").iterdir()
        if kind == "driver" and part.kills and part.kills[0].startswith("checkpoint"):
            assert list((folder / "checkpoints").glob(".step-*.unfinished")), "the kill came too late"
    check_same_run(whole.folder, folder)


def test_engines_killed_in_every_stage(whole: Whole, tmp_path: Path) -> None:
    assert set(LOSSES.values()) == set(STAGES)
    # An evaluation comes before the first step, too; a checkpoint is begun and waited for.
    times = {
        step: {"evaluate": step + 1, "checkpoint": 2 * step - 1}.get(stage, step) for step, stage in LOSSES.items()
    }
    kills = [f"{stage}:{times[step]}:{ENGINES}" for step, stage in LOSSES.items()] + [f"update:7:{BYSTANDERS}"]
    own = ("rollout.deterministic=true", "rollout.engines=3", "rollout.max_restarts=9", "rollout.threads=2")
    with started(tmp_path, (",".join(kills),), *whole.settings, *own) as run:
        assert run.code(PATIENCE * len(kills)) == 0, run.err[-3000:] + run.out[-3000:]
        assert killed(run) == 3 * len(STAGES) + 4, run.out[-3000:]
        assert run.out.count("is started anew") == 3 * len(STAGES), run.out[-3000:]
    check_same_run(whole.folder, run.run_folder)


def check_same_run(one: Path, other: Path) -> None:
    check_same(one, other)
    assert len(numbers(one)) == STEPS
    assert evaluations(one) == evaluations(other) and len(evaluations(one)) == (STEPS + 1) * 3
    latest = [run / "checkpoints" / f"step-{STEPS:06d}" for run in (one, other)]
    files, theirs = (
        {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in latest
    )
    assert files.keys() == theirs.keys() and len([name for name in files if name.endswith(".distcp")]) == 2
    assert [name for name in files if name != "state.json" and files[name] != theirs[name]] == []
    a, b = (json.loads(one["state.json"])["state"] for one in (files, theirs))
    assert a["prompts"] == b["prompts"] and a["shaping"] == b["shaping"]


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Greedy answers to held-out problems, with their rewards."""
    said = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return [one for one in said if one.get("split") == "eval"]
