"""The roles beside the actor, over ranks that answer what the test says; and what can be wrong with their models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.batch import Batch, Level, Sample
from megarl.bridge.model_map import ModelMap
from megarl.config import Config
from megarl.config.checks import problems
from megarl.config.schema import CriticConfig, RewardModelConfig
from megarl.controller import role_checks
from megarl.controller.calls import Later, all_of, now
from megarl.controller.roles import Critic, Learner, NoCritic, NoRewardModel, RewardModel, explained_variance
from megarl.errors import RunError
from megarl.models.heads import make_tiny_reward
from megarl.models.tiny import make_tiny
from megarl.roles.models import updates


class Ranks:
    """Answers in the batch's order, as a WorkerGroup does, and counts updates."""

    def __init__(self, **answers: Any):
        self.answers = answers
        self.calls: list[str] = []
        self.config = Config()

    def forward(self, method: str, what: str, batch: Batch) -> Batch:
        self.calls.append(method)
        name, level, values = self.answers[method]
        picked = values[[int(uid) for uid in batch["uid"]]] if level is Level.SAMPLE else values
        return batch.select([]).set(name, picked, level)

    def update(self, batch: Batch) -> Later[dict[str, float]]:
        self.calls.append("update")
        return now({"loss": 1.0})

    def update_critic(self, batch: Batch) -> Later[dict[str, float]]:
        self.calls.append("update_critic")
        return now({"loss": 2.0})


def samples(n: int = 4) -> Batch:
    made = [
        Sample(str(at), f"g{at // 2}", [1], [2, 3], [1, 1 if at else 0], [-1.0] * 2, "stop", reward=float(at))
        for at in range(n)
    ]
    return Batch.from_samples(made)


def test_a_reward_model_adds_a_named_part() -> None:
    scores = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]])
    ranks = Ranks(reward_scores=("scores", Level.SAMPLE, scores))
    batch = samples()
    for label, wanted in ((None, [11.0, 22.0, 33.0, 44.0]), (1, [10.0, 20.0, 30.0, 40.0])):
        judged = RewardModel(ranks, RewardModelConfig(path="", coefficient=0.5, label=label)).add(batch)  # type: ignore[arg-type]
        torch.testing.assert_close(judged["reward"], batch["reward"] + 0.5 * torch.tensor(wanted))
        assert judged.meta["reward_parts"] == ["rule", "reward_model"]
        torch.testing.assert_close(judged["reward_parts"].sum(1), judged["reward"])
        assert torch.equal(judged["rule_reward"], batch["reward"])
    parts = batch.set("reward_parts", torch.rand(4, 2), Level.SAMPLE)
    parts.meta["reward_parts"] = ["form", "right"]
    judged = RewardModel(ranks, RewardModelConfig(path="")).add(parts)  # type: ignore[arg-type]
    assert judged.meta["reward_parts"] == ["form", "right", "reward_model"] and judged["reward_parts"].shape == (4, 3)
    assert parts.meta["reward_parts"] == ["form", "right"]  # what was given is as it was
    assert NoRewardModel().add(batch) is batch


def test_a_score_that_is_no_number_ends_the_run() -> None:
    ranks = Ranks(reward_scores=("scores", Level.SAMPLE, torch.tensor([[1.0], [2.0], [torch.nan], [1.0]])))
    with pytest.raises(RunError, match=r"the reward model scored sample 2 of the step \(problem 2\) nan"):
        RewardModel(ranks, RewardModelConfig(path="")).add(samples())  # type: ignore[arg-type]


def test_explained_variance_is_over_counted_tokens() -> None:
    batch = samples().set("returns", torch.arange(8.0), Level.RESPONSE)
    assert explained_variance(batch.set("values", torch.arange(8.0) + 3, Level.RESPONSE)) == pytest.approx(1.0)
    assert explained_variance(batch.set("values", torch.zeros(8), Level.RESPONSE)) == pytest.approx(0.0)
    assert explained_variance(batch.set("values", 7 - torch.arange(8.0), Level.RESPONSE)) == pytest.approx(-3.0)
    junk = torch.arange(8.0)
    junk[1] = torch.nan  # the only masked token
    assert explained_variance(batch.set("values", junk, Level.RESPONSE)) == pytest.approx(1.0)
    assert (
        explained_variance(batch.set("returns", torch.ones(8), Level.RESPONSE).set("values", junk, Level.RESPONSE)) == 0
    )


def test_only_the_critic_learns_in_its_warm_up() -> None:
    ranks = Ranks()
    batch = samples().set("returns", torch.rand(8), Level.RESPONSE).set("values", torch.rand(8), Level.RESPONSE)
    actor, critic = Learner(ranks, wait=2), Critic(ranks)  # type: ignore[arg-type]
    done = [all_of(critic.update(batch), actor.update(batch, step)) for step in (1, 2, 3, 4)]
    assert ranks.calls == ["update_critic"] * 3 + ["update", "update_critic", "update"]
    assert [bool(of_actor) for _, of_actor in done] == [False, False, True, True]
    assert all(of_critic["loss"] == 2.0 and "explained_variance" in of_critic for of_critic, _ in done)
    assert NoCritic().update(batch).get() == {} and NoCritic().values(batch).get().names == ()
    cfg = Config(critic=CriticConfig(warmup_steps=2))
    cfg.run.steps, cfg.algorithm.epochs, cfg.algorithm.mini_batches = 5, 2, 3
    assert updates(cfg) == {"actor": 18, "critic": 30}


def test_settings_that_contradict_each_other() -> None:
    cfg = Config(critic=CriticConfig(warmup_steps=3), reward_model=RewardModelConfig(path="x", coefficient=0.0))
    cfg.run.steps, cfg.reference.path = 3, "y"
    cfg.critic.optimizer.min_lr = 1.0
    said = " ".join(problems(cfg))
    assert "critic.warmup_steps=3 of run.steps=3 leave the actor none to learn in; set critic.warmup_steps=2" in said
    assert "reward_model.coefficient=0.0 makes no reward" in said
    assert "reference.path=y but nothing is compared with it" in said
    assert "critic.optimizer.min_lr=1.0 is above critic.optimizer.lr=1e-05" in said


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_tiny("qwen3", folder / "policy")
    make_tiny_reward("qwen3", folder / "reward", labels=3)
    return folder


def found(cfg: Config, folders: Path) -> role_checks.Found:
    policy = folders / "policy"
    return role_checks.find(cfg, policy, ModelMap.from_hf(policy), role_checks.read_tokenizer(policy))


def test_models_of_the_roles(folders: Path) -> None:
    cfg = Config(critic=CriticConfig(), reward_model=RewardModelConfig(path=str(folders / "reward"), label=2))
    cfg.data.max_prompt_tokens, cfg.rollout.max_new_tokens = 64, 16
    cfg.algorithm.kl_coefficient = 0.1
    good = found(cfg, folders)
    policy = str(folders / "policy")
    assert good.problems == []
    assert (good.models.actor, good.models.reference, good.models.critic) == (policy, policy, policy)
    assert good.models.reward_model == str(folders / "reward")
    assert found(Config(), folders).models == role_checks.Models(policy)
    cfg.critic.optimizer.frozen = ["*.layers.0.*"]
    cfg.critic.optimizer.lr_multipliers = {"score_head.*": 10.0}
    assert found(cfg, folders).problems == []
    cfg.critic.optimizer.frozen = ["*.layer.0.*"]
    (said,) = found(cfg, folders).problems
    assert "critic.optimizer.frozen" in said


def test_what_is_wrong_with_models_of_roles(folders: Path, tmp_path: Path) -> None:
    cfg = Config(critic=CriticConfig(path=str(folders / "nowhere")))
    cfg.reward_model = RewardModelConfig(path=str(folders / "policy"))
    said = found(cfg, folders).problems
    assert len(said) == 2 and "critic.path=" in said[0] and "no model folder" in said[0]
    assert "reward_model.path=" in said[1] and "holds no score head" in said[1]

    other = shutil.copytree(folders / "reward", tmp_path / "other")
    config = json.loads((other / "tokenizer.json").read_text())
    vocabulary = config["model"]["vocab"]
    one, two = list(vocabulary)[20:22]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(config))
    cfg = Config(reward_model=RewardModelConfig(path=str(other), label=3))
    cfg.actor.parallel.tensor = cfg.actor.parallel.ranks = 4
    said = found(cfg, folders).problems
    assert len(said) == 4
    assert "tensor parallelism 4 does not divide" in said[0]
    assert "are more than the 512 that the model was made for" in said[1]
    assert "its tokenizer is not the policy's (2 tokens have another number" in said[2]
    assert said[3].startswith("reward_model.label=3 but the reward model's labels are 0 to 2; set one of these")


def test_an_exact_kl_is_over_one_vocabulary(folders: Path, tmp_path: Path) -> None:
    wide = make_tiny("qwen3", tmp_path / "wide", vocab_size=433)
    cfg = Config()
    cfg.data.max_prompt_tokens, cfg.rollout.max_new_tokens = 64, 16
    cfg.algorithm.kl_coefficient, cfg.algorithm.kl_estimator, cfg.algorithm.kl_top_k = 0.1, "top_k", 430
    cfg.reference.path = str(wide)
    said = found(cfg, folders).problems
    assert len(said) == 2, said
    assert (
        "algorithm.kl_estimator=top_k compares distributions over one vocabulary, and the reference's has 433"
        in said[0]
    )
    assert said[1] == "algorithm.kl_top_k=430 is more than the 419 tokens of the vocabulary; set it to that or less"
    cfg.algorithm.kl_estimator = "k3"
    assert found(cfg, folders).problems == []


def test_an_estimator_and_a_critic_need_each_other() -> None:
    from megarl.algorithms import get_advantage

    cfg = Config(critic=CriticConfig())
    assert list(role_checks.estimator_needs(cfg, get_advantage("gae"))) == []
    (said,) = role_checks.estimator_needs(cfg, get_advantage("grpo"))
    assert "algorithm.advantage=grpo asks for no values" in said
    assert list(role_checks.estimator_needs(Config(), get_advantage("grpo"))) == []
