"""Estimator and loss, tried on made-up samples before anything is started: what fails or answers nonsense there would do so after
minutes of starting and sampling."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch

from megarl.algorithms import Objective, advantage, denominators, policy_loss
from megarl.batch import Batch, Level, Sample
from megarl.config import Config
from megarl.config.schema import AlgorithmConfig
from megarl.controller.estimator import Estimator
from megarl.errors import RunError

_GROUPS, _TOKENS = 2, 4


def problems(cfg: Config, *, estimator: bool = True, loss: bool = True) -> Iterator[str]:
    """One sentence for each thing that is wrong with how the recipe calls its estimator and its policy loss. What has a problem
    that is known already (an unknown name, a value out of range) is left out."""
    if estimator and loss:
        yield from _idle(cfg)
    batch = _made_up(cfg.rollout.n)
    if estimator:
        try:
            batch = Estimator(cfg.algorithm)(batch)
        except RunError as error:
            yield f"algorithm.advantage={cfg.algorithm.advantage}, tried on made-up samples: {error}"
        else:
            yield from _alone(cfg, batch)
    if "advantages" not in batch:
        batch = batch.set("advantages", torch.ones(len(batch) * _TOKENS), Level.RESPONSE)
    if loss:
        yield from _loss(cfg, Objective.from_config(cfg.algorithm), batch)


def _alone(cfg: Config, batch: Batch) -> Iterator[str]:
    """Samples that are alone in their groups, and an estimator that compares within them. Their rewards differ."""
    if cfg.rollout.n == 1 and not bool(batch["advantages"].any()):
        yield (
            f"rollout.n=1 leaves a sample alone in its group, and algorithm.advantage={cfg.algorithm.advantage} "
            "compares within groups: every advantage would be 0; set rollout.n=2 or more"
        )


def _idle(cfg: Config) -> Iterator[str]:
    """Settings that were set and that the named function does not take."""
    a, defaults = cfg.algorithm, AlgorithmConfig()
    for kind, name, registry in (("advantage", a.advantage, advantage), ("policy_loss", a.policy_loss, policy_loss)):
        functions = [registry.get(name)]
        if kind == "policy_loss" and (prepare := policy_loss.traits(name).prepare) is not None:
            functions.append(prepare)
        parameters = {p.name: p for f in functions for p in inspect.signature(f).parameters.values()}
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            continue
        for setting in registry.settings:
            if getattr(a, setting) != getattr(defaults, setting) and setting not in parameters:
                yield (
                    f"algorithm.{setting}={getattr(a, setting)} means nothing to algorithm.{kind}={name}, which does not take "
                    f"it; remove it"
                )


def _made_up(n: int) -> Batch:
    """Groups of n samples with everything that a recipe can make; rewards differ in the first group and not in the second. With
    one sample each, groups differ."""
    samples = []
    for group in range(_GROUPS):
        for at in range(n):
            mask = [1] * _TOKENS if at % 2 else [1, 0, 1, 1]
            reward = float(at == 0) if group == 0 else 0.25 if n == 1 else 1.0
            samples.append(Sample(f"p{group}", f"g{group}", [0], [0] * _TOKENS, mask, [-1.0] * _TOKENS, reward=reward))
    batch = Batch.from_samples(samples)
    generator = torch.Generator().manual_seed(0)

    def random() -> torch.Tensor:
        return torch.rand(len(samples) * _TOKENS, generator=generator)

    rewards = torch.zeros(len(samples), _TOKENS)
    rewards[:, -1] = torch.as_tensor(batch["reward"])
    fields = {
        "token_rewards": rewards.flatten(),
        "old_log_probs": -random() - 0.5,
        "ref_log_probs": -random() - 0.5,
        "entropy": random(),
        "sum_p2": random(),
        "values": random(),
    }
    for name, values in fields.items():
        batch = batch.set(name, values, Level.RESPONSE)
    batch = batch.set("baseline", torch.full((len(samples),), 0.5), Level.SAMPLE)
    return batch.set("reward_parts", torch.rand(len(samples), 2, generator=generator), Level.SAMPLE)


def _loss(cfg: Config, objective: Objective, batch: Batch) -> Iterator[str]:
    data = {name: batch.padded(name) for name in objective.reads if name in batch}
    log_probs_BT = (batch.padded("old_log_probs") + 0.05).requires_grad_()
    if objective.exact_kl:
        data["exact_kl"] = batch.padded("entropy")
    told = f"algorithm.policy_loss={cfg.algorithm.policy_loss}, tried on made-up samples: "
    try:
        data |= objective.prepare(data)
        totals = denominators(data["loss_mask"], cfg.rollout.max_new_tokens)
        result = objective(log_probs_BT, batch.padded("entropy").requires_grad_(), data, totals)
        result.loss.backward()
    except (Exception, SystemExit) as error:  # noqa: BLE001 it may be the user's own
        yield told + " ".join(str(error).split())
        return
    gradient_BT = log_probs_BT.grad
    if not bool(result.loss.isfinite()):
        yield told + f"its loss is {float(result.loss.detach())}"
    elif gradient_BT is None or not bool(gradient_BT.isfinite().all()):
        yield told + ("it has no gradient" if gradient_BT is None else "its gradient is not finite")
