"""configs/recipes/ppo.yaml, as it stands: four roles on tiny models, two steps, the first of which is the critic's alone."""

from __future__ import annotations

import math
from pathlib import Path

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


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        ("actor.parallel.tensor=1", "actor.parallel.sequence=false", "actor.parallel.pipeline=2"),
        ("actor.parallel.tensor=1", "actor.parallel.sequence=false"),  # two ranks with samples of their own
        ("actor.micro_batch_tokens=100", "critic.micro_batch_tokens=60", "reward_model.micro_batch_tokens=40"),
    ],
    ids=["pp2", "dp2", "small micro-batches"],
)
def test_recorded_samples_give_the_same_numbers_on_another_layout(tmp_path: Path, other: tuple[str, ...]) -> None:
    """Every metric of both learners, to 1e-4: they come after up to eight optimizer steps. The critic starts as a reward model."""
    # A large eps: AdamW's first step is else the sign of the gradient, which rounding turns where it is nearly 0.
    common = [
        "critic.path=tiny-qwen3-reward",
        "actor.optimizer.eps=1e-2",
        "critic.optimizer.eps=1e-2",
        "data.eval=null",
    ]
    common += ["export.hf=false", "observe.progress=false"]
    record = tmp_path / "samples"
    rows = []
    for name, source in (("first", (f"rollout.record={record}",)), ("second", (f"rollout.replay={record}", *other))):
        with Run(tmp_path / name, *common, *source, config="configs/recipes/ppo.yaml") as run:
            assert run.finish() == 0, run.err[-3000:]
            rows.append(run.steps())
    for one, two in zip(*rows, strict=True):
        names = [n for n in one if n.startswith(("actor/", "critic/", "reward", "shaping/"))]
        assert len(names) > 15
        for name in names:
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name
    assert rows[0][0]["critic/explained_variance"] != 0  # values of a head that has learned before


@pytest.mark.slow
def test_ppo_learns(tmp_path: Path) -> None:
    """The reward of random models rises on a toy task."""
    settings = ["run.steps=30", "critic.warmup_steps=2", "rollout.n=8", "actor.optimizer.lr=1e-3", "data.eval=null"]
    settings += ["algorithm.shaping.kl_coefficient=0.001", "reward_model.coefficient=0.01", "export.hf=false"]
    settings += ["reshard.probe=false", "observe.progress=false", "actor.parallel.ranks=1", "actor.parallel.tensor=1"]
    settings += ["actor.parallel.sequence=false", "algorithm.mini_batches=1"]
    with Run(tmp_path / "run", *settings, config="configs/recipes/ppo.yaml") as run:
        assert run.finish(400) == 0, run.err[-3000:]
        earned = [row["reward_part/rule"] for row in run.steps()]
        explained = [row["critic/explained_variance"] for row in run.steps()]
    assert sum(earned[-5:]) > 2 * sum(earned[:5]) + 0.1, earned
    assert all(math.isfinite(value) for value in explained)
