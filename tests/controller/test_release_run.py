"""Runs whose engines give memory back while the ranks work: numbers are those of a run without, and memory falls where it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.models.tiny import make_tiny
from tests.controller.runs import LEARNABLE, Run

FEW = (*LEARNABLE, "run.steps=3", "rollout.max_total_tokens=100000", "evaluation.every=1")
# what depends on time and memory, and not on numbers
MEASURED = ("time/", "throughput/", "memory/", "reshard/seconds", "eta")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 60 MB of weights."""
    return make_tiny("qwen3", tmp_path_factory.mktemp("models") / "qwen3", intermediate_size=14_000)


def rows(run: Run) -> list[dict[str, object]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(MEASURED)} for row in run.lines("metrics.jsonl")
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_numbers_are_those_of_a_run_that_keeps_its_memory(model: Path, tmp_path: Path) -> None:
    found, peaks = {}, {}
    for what in ("off", "cache", "all"):
        with Run(tmp_path / what, *FEW, f"model.path={model}", f"rollout.release_memory={what}") as run:
            assert run.finish(250) == 0, run.err
            assert run.leftovers() == []
            found[what], peaks[what] = rows(run), run.metrics(3)
            samples = run.lines("samples.jsonl")
            found[what].append({"samples": [sample["response"] for sample in samples]})
    for what in ("cache", "all"):
        for row, kept in zip(found[what], found["off"], strict=True):
            assert row.keys() == kept.keys()
            # What an engine and its trainer differ by is rounding alone, of which a sequence has as much as its tokens together.
            slack = {key: 1e-5 if key.startswith("mismatch/") else 1e-6 for key in kept}
            near = {k: v if k == "samples" else pytest.approx(v, rel=1e-4, abs=slack[k]) for k, v in kept.items()}
            assert [(what, key, row[key], kept[key]) for key in kept if row[key] != near[key]] == []
    cache, weights = 100_000 * 4 * 2 * 2 * 24 * 4 / 1e9, (model / "model.safetensors").stat().st_size / 1e9

    def fallen(what: str, stage: str) -> float:
        key = f"memory/{stage}_engines_peak_gb"
        return peaks["off"][key] - peaks[what][key]

    for stage in ("log_probs", "update"):
        assert fallen("cache", stage) == pytest.approx(cache, rel=0.3)
        assert fallen("all", stage) == pytest.approx(cache + weights, rel=0.3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_from_a_checkpoint_and_replays(model: Path, tmp_path: Path) -> None:
    """Partial rollouts, and checkpoints that are written beside the steps; engines have released while one is read."""
    record = tmp_path / "record.jsonl"
    common = (*FEW, f"model.path={model}", "rollout.release_memory=all", "evaluation.every=0", "data.eval=null")
    partial = (
        "rollout.oversample=1.5",
        "rollout.unfinished=keep",
        "checkpoint.every=1",
        "checkpoint.asynchronous=true",
    )
    with Run(tmp_path / "first", *common, *partial, "run.steps=2", f"rollout.record={record}") as first:
        assert first.finish(250) == 0, first.err
    again = ("run.resume=auto", f"run.root={first.root}", f"rollout.record={record}")
    with Run(tmp_path / "again", *common, *partial, *again) as run:
        assert run.finish(250) == 0, run.err
    whole = first.steps()
    assert [row["step"] for row in whole] == [1, 2, 3]
    with Run(tmp_path / "replayed", *common, f"rollout.replay={record}") as run:
        assert run.finish(250) == 0, run.err
        for row, kept in zip(run.steps(), whole, strict=True):
            assert row["actor/grad_norm"] == pytest.approx(kept["actor/grad_norm"], rel=1e-4)
