"""Killed and gone on from a checkpoint, a run ends as if nothing had happened: weights to the bit, and every number of every step."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.cli import main
from tests.controller.runs import LEARNABLE, Run

COMMON = (*LEARNABLE, "run.steps=4", "rollout.n=4", "data.eval=null", "observe.progress=false")
PPO = (*COMMON, "algorithm.advantage=gae", "critic.optimizer.lr=1e-3", "algorithm.shaping.normalize=true")
PPO = (*PPO, "algorithm.shaping.kl_coefficient=0.05", "algorithm.shaping.kl_target=0.1")
OTHER_LAYOUTS = {
    "pp2": ("actor.parallel.tensor=1", "actor.parallel.sequence=false", "actor.parallel.pipeline=2"),
    "dp2": ("actor.parallel.tensor=1", "actor.parallel.sequence=false"),
}


class Whole:
    """An uninterrupted run whose samples are recorded."""

    def __init__(self, folder: Path, settings: tuple[str, ...]):
        self.settings = settings
        self.recording = folder / "rollouts.jsonl"
        self.run = finished(folder / "whole", *settings, f"rollout.record={self.recording}")

    def replayed(self, *more: str) -> tuple[str, ...]:
        """Checkpoints are written while the next steps run."""
        saving = ("checkpoint.every=1", "checkpoint.keep=9", "checkpoint.asynchronous=true")
        return (*self.settings, f"rollout.replay={self.recording}", *saving, *more)


def finished(folder: Path, *settings: str, root: Path | None = None) -> Run:
    with Run(folder, *settings, *([f"run.root={root}"] if root else [])) as run:
        assert run.finish() == 0, run.err[-3000:] + run.out[-2000:]
        assert run.leftovers() == []
        return run


def killed(folder: Path, at: int, *settings: str, title: str | None = None) -> Run:
    """kill -9, after the checkpoint of a step, of the command or of a process of its."""
    with Run(folder, *settings) as run:
        latest = f"*/checkpoints/step-{at:06d}/state.json"
        run.until(lambda: list(run.root.glob(latest)), 150, f"a checkpoint of step {at}")
        if title is None:
            run.signal(signal.SIGKILL, group=False)
        else:
            run.kill_one(title)
            assert run.code(60) == 1
        run.stop()
        return run


def started(folder: Path, kills: tuple[str, ...], *settings: str) -> Run:
    """`kills`: for each time that it starts, what is killed where (tests/controller/killing.py)."""
    told = {"MEGARL_TEST_KILLS": ";".join(kills), "MEGARL_TEST_SAID": str(folder / "kills")}
    return Run(folder, *settings, environment=told, module="tests.controller.killing")


def back_to(run: Path, step: int) -> None:
    """As if the run had come no further: a kill may come later than it was meant."""
    for folder in (run / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    (run / "checkpoints" / "latest").write_text(f"step-{step:06d}\n")


def numbers(run: Path) -> list[dict[str, Any]]:
    """Every step's metrics but those of time."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("time/", "throughput/", "reshard/", "rollout/", "memory/")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows if "reward/mean" in row]


def weights(run: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for role in ("model", "critic"):
        for file in sorted((run / role).glob("*.safetensors")):
            yield from ((f"{role}: {name}", tensor) for name, tensor in load_file(file).items())


def check_same(one: Path, other: Path, tolerance: float = 0.0, unlike: tuple[str, ...] = ()) -> None:
    a, b = dict(weights(one)), dict(weights(other))
    assert a.keys() == b.keys() and a
    for name, tensor in a.items():
        assert float((tensor - b[name]).abs().max()) <= tolerance * float(tensor.abs().max()), name
    rows = [
        [{k: v for k, v in row.items() if not (unlike and k.startswith(unlike))} for row in pair]
        for pair in zip(numbers(one), numbers(other), strict=True)
    ]
    assert [row["step"] for row, _ in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 4
    for row, again in rows:
        assert again == pytest.approx(row, rel=tolerance * 10, abs=tolerance)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp("grpo"), COMMON)


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp("ppo"), PPO)


def gone_on(folder: Path, whole: Whole, at: int, *more: str, title: str | None = None) -> Run:
    run = killed(folder / "killed", at, *whole.replayed(), title=title)
    back_to(run.run_folder, at)
    return finished(folder / "again", *whole.replayed("run.resume=auto", *more), root=run.root)


def test_killed_and_gone_on_it_is_the_same_run(whole: Whole, tmp_path: Path) -> None:
    """An engine's scheduler in the middle of an update; then the command, while it writes the third checkpoint."""
    kills = "update:1:sglang::scheduler,checkpoint:5:driver"  # begun, waited for, …
    with started(tmp_path / "killed", (kills,), *whole.replayed()) as run:
        assert run.code(200) == 128 + signal.SIGKILL, run.err[-3000:]
        assert "rollout engine 0 is started anew (1 of 3 in this step)" in run.out
        run.stop()
    folder = run.run_folder
    assert list((folder / "checkpoints").glob(".step-000003.unfinished")), "the kill came too late"
    run = finished(tmp_path / "again", *whole.replayed("run.resume=auto"), root=run.root)
    check_same(whole.run.run_folder, folder)
    assert "goes on after step 2" in run.out
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    assert sorted(p.name for p in folder.glob("config*.yaml")) == ["config.until-step-2.yaml", "config.yaml"]
    converted = tmp_path / "converted"
    assert (
        main(["convert", "megatron-to-hf", f"{folder}/checkpoints/step-000004/actor", str(converted), "--quiet"]) == 0
    )
    exported = load_file(folder / "model" / "model.safetensors")
    again = {name: tensor for file in converted.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert exported.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in exported.items())
    steps = [json.loads(line)["step"] for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and set(steps) == {1, 2, 3, 4} and steps.count(3) == 16


@pytest.mark.slow
@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_in_another_layout(whole: Whole, tmp_path: Path, layout: str) -> None:
    gone_on(tmp_path, whole, 2, *OTHER_LAYOUTS[layout])
    check_same(whole.run.run_folder, next((tmp_path / "killed" / "runs").iterdir()), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("title", [None, "ray::Worker"])
def test_critic_and_statistics_come_back(ppo: Whole, tmp_path: Path, title: str | None) -> None:
    gone_on(tmp_path, ppo, 2, title=title)
    check_same(ppo.run.run_folder, next((tmp_path / "killed" / "runs").iterdir()))


@pytest.mark.slow
def test_sampled_again_it_is_the_same_run(whole: Whole, tmp_path: Path) -> None:
    """No recording: every response has a seed of its own, which does not depend on what was before."""
    settings = (*COMMON, "rollout.deterministic=true")
    run = killed(tmp_path / "killed", 2, *settings, "run.steps=1000", "checkpoint.every=1")
    back_to(run.run_folder, 2)
    finished(tmp_path / "again", *settings, "checkpoint.every=2", "run.resume=auto", root=run.root)
    alone = finished(tmp_path / "whole", *settings)
    check_same(alone.run_folder, run.run_folder)
    # What an engine says of its tokens depends, in the last bits, on what it samples beside them, and nothing else does.
    check_same(whole.run.run_folder, run.run_folder, unlike=("mismatch/",))
    for row, again in zip(numbers(whole.run.run_folder), numbers(run.run_folder), strict=True):
        assert again == pytest.approx(row, rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_what_was_sampled_and_not_used_is_not_lost(tmp_path: Path) -> None:
    """Unfinished responses of an oversampled step wait in the checkpoint; groups of another size are filled up to the new one."""
    settings = (*COMMON, "rollout.oversample=2", "rollout.unfinished=keep", "checkpoint.every=1")
    run = killed(tmp_path / "killed", 2, *settings, "run.steps=1000")
    back_to(run.run_folder, 2)
    state = json.loads((run.run_folder / "checkpoints" / "step-000002" / "state.json").read_text())["state"]
    waiting = [g["name"] for key in ("resumed", "new") for g in state["rollout"][key]]
    waiting += [group["name"] for group in state["rollout"]["over"]]
    assert waiting
    finished(tmp_path / "again", *settings, "rollout.n=6", "run.resume=auto", root=run.root)
    lines = map(json.loads, (run.run_folder / "samples.jsonl").read_text().splitlines())
    later = Counter(line["uid"] for line in lines if line["step"] == 3)
    assert later.keys() & {name.partition("@")[0] for name in waiting}
    assert all(count % 6 == 0 for count in later.values())
    assert [row["step"] for row in numbers(run.run_folder)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_it_goes_on_by_itself(whole: Whole, tmp_path: Path) -> None:
    with Run(tmp_path, *whole.replayed("run.max_restarts=1")) as run:
        run.until(lambda: list(run.root.glob("*/checkpoints/step-000001/state.json")), 150, "a checkpoint")
        run.kill_one("ray::Worker")
        assert run.code(240) == 0, run.err[-3000:]
        run.gone(15)
        assert "the run failed and goes on from step" in run.out and "run.max_restarts=1" in run.out
        assert run.leftovers() == []
    check_same(whole.run.run_folder, run.run_folder)


@pytest.mark.slow
def test_what_sigterm_could_not_save_is_told(tmp_path: Path) -> None:
    with Run(tmp_path, *COMMON, "checkpoint.every=100", "run.steps=1000") as run:
        run.until(run.steps, 150, "a step")
        (run.run_folder / "checkpoints").write_text("in the way of the folder")
        run.signal(signal.SIGTERM, group=False)
        assert run.code(60) == 130
        (said,) = run.said
        assert said.startswith(
            "megarl: interrupted: told to end (SIGTERM), it failed before it was saved: cannot write"
        )
        assert "cannot write" in json.loads((run.run_folder / "summary.json").read_text())["error"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_saves_first(whole: Whole, tmp_path: Path, number: signal.Signals) -> None:
    settings = [s for s in whole.replayed("run.resume=auto") if not s.startswith("checkpoint")]
    with Run(tmp_path / "told", *settings, "checkpoint.every=100", "rollout.replay=null", "run.steps=1000") as run:
        run.until(run.steps, 150, "a step")
        run.signal(number, group=False)
        assert run.code(60) == 130
        run.gone(15)
        assert f"told to end ({number.name}) after step" in run.out
    step = int((run.run_folder / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))
    assert (
        step == len(run.steps())
        and json.loads((run.run_folder / "summary.json").read_text())["status"] == "interrupted"
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["altered", "short"])
def test_a_damaged_part_is_one_sentence(whole: Whole, tmp_path: Path, how: str) -> None:
    run = finished(tmp_path / "done", *whole.replayed())
    latest = run.run_folder / "checkpoints" / "step-000004"
    part = latest / "actor" / "__1_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content if how == "altered" else content[:-9])
    with Run(tmp_path / "again", *COMMON, f"run.resume={run.run_folder}", "run.steps=5") as again:
        assert again.code(120) == 2
        again.gone(15)
        told = [line for line in again.err.splitlines() if "checkpoint" in line]
        assert len(told) == 1 and f"Another one is there: run.resume={latest.with_name('step-000003')}" in told[0]
        assert ("its checksum is not the one" if how == "altered" else "with another size than was written") in told[0]
        assert "Traceback" not in again.err


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(whole: Whole, tmp_path: Path) -> None:
    run = finished(tmp_path / "done", *whole.replayed())
    with Run(tmp_path / "again", *whole.replayed(f"run.resume={run.run_folder}", "model.path=tiny-llama")) as again:
        assert again.code(60) == 2
        assert 'model.path was "tiny-qwen3" in the run' in again.err
