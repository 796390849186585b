"""`megarl train configs/tiny.yaml`, the real command in a process of its own: one recorded run, and its replay on other layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl import config, data, models
from tests.controller.runs import CONFIG, LEARNABLE, Run

LAYOUTS = {
    "tp2 sp": (),
    "pp2": ("actor.parallel.tensor=1", "actor.parallel.sequence=false", "actor.parallel.pipeline=2"),
    "dp2": ("actor.parallel.tensor=1", "actor.parallel.sequence=false"),
}


# A replay takes a minute: the slow set has all of them.
EACH = ["tp2 sp", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("pp2", "dp2"))]


class Finished:
    def __init__(self, folder: Path):
        self.folder = folder
        self.recording = folder / "rollouts.jsonl"
        self.begun: set[str] = set()

    @functools.cache
    def of(self, layout: str) -> Run:
        """A run that has ended well. The first records what was sampled, the others are given it."""
        assert layout not in self.begun, "the run failed, see the first test that wanted it"
        self.begun.add(layout)
        if layout == "tp2 sp":
            rollout = f"rollout.record={self.recording}"
        else:
            self.of("tp2 sp")
            rollout = f"rollout.replay={self.recording}"
        return finished(self.folder / layout.replace(" ", "-"), rollout, *LAYOUTS[layout])


def finished(folder: Path, *overrides: str) -> Run:
    with Run(folder, *LEARNABLE, *overrides) as run:
        code = run.finish()
        assert code == 0, run.err
        assert run.leftovers() == []
        return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("layout", EACH)
def test_the_run_folder_is_complete(runs: Finished, layout: str) -> None:
    run = runs.of(layout)
    found = {path.name for path in run.run_folder.iterdir()}
    assert found >= {
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "samples.jsonl",
        "tensorboard",
        "model",
        "versions.json",
    }
    assert "logs" not in found  # kept only after a failure
    rows = run.lines("metrics.jsonl")
    assert [(row["step"], "eval/accuracy" in row) for row in rows] == [(0, True), (1, False), (2, False), (2, True)]
    needed = {"reward/mean", "reward/accuracy", "response/length_mean", "actor/entropy", "actor/ppo_kl", "actor/loss"}
    needed |= {"actor/grad_norm", "actor/lr", "actor/clip_fraction", "mismatch/abs_mean", "mismatch/abs_max"}
    needed |= {"reshard/seconds", "reshard/verified", "throughput/tokens_per_second", "throughput/samples_per_second"}
    needed |= {
        f"time/{stage}" for stage in ("rollout", "score", "log_probs", "advantages", "update", "reshard", "step")
    }
    for row in run.steps():
        assert needed <= row.keys()
        stages = sum(v for k, v in row.items() if k.startswith("time/") and k != "time/step")
        assert stages == pytest.approx(row["time/step"])
    samples = run.lines("samples.jsonl")
    assert [sum(s["step"] == step and s.get("split") != "eval" for s in samples) for step in (0, 1, 2)] == [0, 16, 16]
    assert [sum(s["step"] == step and s.get("split") == "eval" for s in samples) for step in (0, 1, 2)] == [8, 0, 8]
    assert list((run.run_folder / "tensorboard").glob("events*"))
    written = config.load(run.run_folder / "config.yaml", [])
    assert written.model.path == "tiny-qwen3" and written.run.root == str(run.root)
    for step, row in enumerate(run.steps(), start=1):
        rewards = [s["reward"] for s in samples if s["step"] == step and s.get("split") != "eval"]
        assert row["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))


@pytest.mark.parametrize("layout", EACH)
def test_a_person_reads_where_everything_lies(runs: Finished, layout: str) -> None:
    run = runs.of(layout)
    assert run.said == [] and "Traceback" not in run.err
    for part in ("greedy accuracy", "every sync verified", str(run.run_folder / "model"), "1/2", "2/2"):
        assert part in run.out


@pytest.mark.parametrize("layout", EACH)
def test_every_step_is_on_policy_and_every_sync_exact(
    runs: Finished, layout: str, record_invariant: Callable[[str, float, float], None]
) -> None:
    for number, row in enumerate(runs.of(layout).steps(), start=1):
        assert row["actor/ratio_max"] == 1.0 and row["actor/ppo_kl"] == 0.0
        assert row["actor/abs_log_ratio_max"] == 0.0 and row["actor/clip_fraction"] == 0.0
        assert row["actor/applied"] == 1.0 and row["actor/grad_norm"] > 1e-3
        assert row["reshard/verified"] == row["reshard/tensors"] == 46
        head = f"run on {layout}, step {number}:"
        record_invariant(f"{head} engine's log-probs of a probe after the sync", row["reshard/probe_abs_max"], 1e-5)
        if layout == "tp2 sp" or number == 1:  # a replayed second step was sampled from other weights by rounding
            record_invariant(f"{head} sampled log-probs, engine and trainer", row["mismatch/abs_max"], 1e-5)


@pytest.mark.parametrize("layout", EACH[1:])
def test_equal_rollouts_give_equal_loss_and_gradient(
    runs: Finished, layout: str, record_invariant: Callable[[str, float, float], None]
) -> None:
    want, got = runs.of("tp2 sp").metrics(1), runs.of(layout).metrics(1)
    assert want["reward/std"] > 0.01 and want["reward/groups_all_equal"] == 0.0
    assert got["reward/mean"] == want["reward/mean"]
    for key in ("actor/loss", "actor/grad_norm", "actor/entropy"):
        record_invariant(f"replay on {layout}: {key} at step 1, relative", abs(got[key] / want[key] - 1), 1e-5)
    second = runs.of("tp2 sp").metrics(2), runs.of(layout).metrics(2)
    assert second[1]["actor/loss"] == pytest.approx(second[0]["actor/loss"], rel=1e-3)


@pytest.mark.parametrize("layout", EACH)
def test_the_exported_model_answers_as_the_engine(runs: Finished, layout: str) -> None:
    import transformers

    run = runs.of(layout)
    folder = run.run_folder / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    settings = config.load(CONFIG, [])
    prompts = data.build(settings.data, tokenizer, settings.run.seed).eval.all()
    answers = {s["uid"]: s for s in run.lines("samples.jsonl") if s.get("split") == "eval" and s["step"] == 2}
    assert len(prompts) == len(answers) == 8
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids])
        told = model.generate(ids, max_new_tokens=settings.rollout.max_new_tokens, do_sample=False)[0, ids.shape[1] :]
        answer = answers[prompt.uid]
        assert tokenizer.decode(told, skip_special_tokens=True) == answer["response"]
        assert len(told) == answer["tokens"]


@pytest.mark.parametrize("layout", EACH)
def test_the_exported_model_has_learned_something(runs: Finished, layout: str) -> None:
    start = load_file(models.resolve("tiny-qwen3") / "model.safetensors")
    end: dict[str, Any] = {}
    for file in (runs.of(layout).run_folder / "model").glob("*.safetensors"):
        end |= load_file(file)
    assert end.keys() == start.keys()
    for name, tensor in start.items():
        moved = (end[name] - tensor).abs().max()
        assert end[name].shape == tensor.shape and 0 < moved < 1e-3, (
            name
        )  # two steps of at most 1e-4, norms of order one


@pytest.mark.slow
def test_kl_to_the_reference_starts_at_zero(tmp_path: Path) -> None:
    run = finished(tmp_path, "algorithm.kl_coefficient=0.1", "actor.optimizer.lr=1e-3")
    first, second = run.steps()
    assert first["actor/kl"] == 0.0
    assert second["actor/kl"] > 1e-6


@pytest.mark.slow
def test_several_updates_a_step(tmp_path: Path) -> None:
    run = finished(tmp_path, "algorithm.mini_batches=2", "algorithm.epochs=2", "actor.optimizer.lr=1e-3")
    for row in run.steps():
        assert row["actor/ratio_max"] > 1.001  # the second update is off-policy already
        assert row["actor/ppo_kl"] != 0.0
