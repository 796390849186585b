"""configs/recipes/ppo.yaml, as it stands: four roles on tiny models, two steps, the first of which is the critic's alone."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.bridge.hf_io import HFReader
from megarl.models import resolve
from tests.controller.runs import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    with Run(
        tmp_path_factory.mktemp("ppo") / "run", "observe.progress=false", config="configs/recipes/ppo.yaml"
    ) as run:
        assert run.finish() == 0, run.err[-3000:]
        yield run


def test_every_number_is_finite_and_of_the_right_sign(run: Run) -> None:
    first, second = run.steps()
    for row in (first, second):
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float))
        assert row["critic/applied"] == 1.0 and row["critic/grad_norm"] > 1e-4 and row["critic/lr"] == 1e-3
        assert row["critic/value_loss"] > 0 and row["critic/value_error_max"] > 0
        assert row["critic/value_error_square"] == pytest.approx(2 * row["critic/value_loss"], rel=0.2)
        assert 0 <= row["critic/value_clip_fraction"] <= 1 and row["critic/explained_variance"] <= 1
        assert row["reward/mean"] == pytest.approx(row["reward_part/rule"] + row["reward_part/reward_model"], abs=1e-5)
        assert 0 <= row["reward_part/rule"] <= 1 and row["reward_part/reward_model"] != 0
    # Values begin at 0, so they explain nothing; then they have learned something of where rewards lie.
    assert first["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert second["critic/value_mean"] != 0


def test_the_actor_waits_for_its_critic(run: Run) -> None:
    first, second = run.steps()
    assert not [key for key in first if key.startswith("actor/") and key != "actor/learned_fraction"]
    assert second["actor/applied"] == 1.0 and second["actor/grad_norm"] > 1e-3
    # Samples of the second step are still those of the first weights: KL to the reference is 0, its coefficient falls.
    assert first["shaping/kl"] == second["shaping/kl"] == 0.0
    assert second["shaping/kl_coefficient"] == pytest.approx(0.05 * (1 - 0.2 * 16 / 1000))
    assert second["actor/kl"] > 0 and second["actor/ratio_max"] > 1.001


def test_both_models_are_written(run: Run) -> None:
    import transformers

    start = HFReader(resolve("tiny-qwen3"))
    critic = transformers.AutoModelForSequenceClassification.from_pretrained(
        run.run_folder / "critic", dtype=torch.float32
    )
    assert critic.config.num_labels == 1 and critic.score.weight.abs().max() > 1e-4
    moved = [n for n, t in critic.model.state_dict().items() if not torch.equal(t, start.get(f"model.{n}"))]
    assert len(moved) > 40  # the body learned, too
    policy = HFReader(run.run_folder / "model")
    assert any(not torch.equal(policy.get(name), start.get(name)) for name in policy.names)
