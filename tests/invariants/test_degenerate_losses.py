"""Every loss, KL and aggregation on every degenerate batch: finite values and gradients, and nothing from masked places.

A new function is in the table by itself. Each row of the table counts the broken promises of one function over all cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megarl.algorithms import Objective, call, denominators, kl
from megarl.algorithms.aggregation import AGGREGATIONS, aggregate
from megarl.algorithms.divergence import DIRECTIONS, KL_ESTIMATORS, full_kl
from megarl.algorithms.policy_losses import policy_loss
from megarl.algorithms.value_loss import ValueObjective

INF, NAN = math.inf, math.nan
Record = Callable[[str, float, float], None]


class Case(NamedTuple):
    """(B, T) each."""

    log_probs: Tensor
    old_log_probs: Tensor
    mask: Tensor


def case(shape: tuple[int, int], mask: Tensor | None = None, drift: float = 0.1) -> Case:
    old = torch.full(shape, -1.5)
    return Case(old + drift, old, torch.ones(shape) if mask is None else mask)


def with_junk(junk: float) -> Case:
    """Masked at the end, in the middle, and over a whole row; junk in all of it."""
    plain = case((4, 4), torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0] * 4, [1, 1, 1, 1]]).float())
    masked = plain.mask == 0
    return Case(*(torch.where(masked, junk, x) for x in plain[:2]), plain.mask)


def with_log_probs(log_prob: float, old_log_prob: float) -> Case:
    plain = case((4, 3))
    plain.log_probs[:, 1], plain.old_log_probs[:, 1] = log_prob, old_log_prob
    return plain


CASES = {
    "an ordinary batch": case((4, 3)),
    "on-policy": case((4, 3), drift=0.0),
    "certain tokens": Case(torch.zeros(3, 3), torch.zeros(3, 3), torch.ones(3, 3)),
    "a row all masked": case((3, 3), torch.tensor([[1.0] * 3, [1.0] * 3, [0.0] * 3])),
    "everything masked": case((3, 3), torch.zeros(3, 3)),
    "one token": case((2, 1)),
    "one token of one sample": case((1, 1)),
    "one token of many": case((3, 3), torch.tensor([[0.0] * 3, [0.0, 1.0, 0.0], [0.0] * 3])),
    "an empty batch": case((0, 3)),
    "no tokens": case((2, 0)),
    "a log-ratio of +inf": with_log_probs(-1.0, -INF),
    "a log-ratio of -inf": with_log_probs(-INF, -1.0),
    "a huge log-ratio": with_log_probs(-1.0, -3e38),
    "a huge negative log-ratio": with_log_probs(-3e38, -1.0),
    "only log-ratios of +inf": Case(torch.full((2, 3), -1.0), torch.full((2, 3), -INF), torch.ones(2, 3)),
    "NaN where masked": with_junk(NAN),
    "+inf where masked": with_junk(INF),
    "-inf where masked": with_junk(-INF),
}
# Their gradient is -A whatever the ratio: there is no log-ratio in them to clamp. Where pi = 0 they have none either.
WITHOUT_RATIO = {"gpg", "reinforce"}


def signals(mask: Tensor) -> Iterator[Tensor]:
    """Advantages: of one sign, 0, of both signs and different sizes; NaN where masked."""
    values = [torch.full(mask.shape, value) for value in (1.0, -1.0, 0.0)]
    values.append(torch.linspace(-3, 4, mask.numel()).reshape(mask.shape))
    yield from (torch.where(mask == 0, NAN, value) for value in values)


def data_of(objective: Objective, batch: Case, advantages: Tensor) -> dict[str, Tensor]:
    """What the trainer would hand to the objective, junk included."""
    data = {"old_log_probs": batch.old_log_probs, "ref_log_probs": batch.old_log_probs, "advantages": advantages}
    data |= {"loss_mask": batch.mask, "rollout_log_probs": batch.old_log_probs.clamp(min=-50)}
    data["correction_weights"] = torch.where(batch.mask == 0, NAN, 0.5)
    return data | objective.prepare(data)


def broken(values: list[Tensor], gradient: Tensor | None, dead: Tensor) -> bool:
    """A value or gradient that is not finite, or a gradient where there must be none."""
    assert gradient is not None
    return not (all(bool(x.isfinite().all()) for x in (*values, gradient)) and not bool(gradient[dead].any()))


@pytest.mark.parametrize("name", policy_loss.names)
def test_policy_losses(name: str, record_invariant: Record) -> None:
    bad = []
    for title, batch in CASES.items():
        for number, advantages in enumerate(signals(batch.mask)):
            for dual in (3.0, None):
                log_probs = batch.log_probs.clone().requires_grad_()
                data = data_of(Objective(policy_loss=name), batch, advantages)
                offered = {f"{key}_BT": value for key, value in data.items()} | {"mask_BT": batch.mask}
                offered |= {"log_probs_BT": log_probs, "behaviour_log_probs_BT": data["rollout_log_probs"]}
                result = call(policy_loss.get(name), {**offered, "clip_dual": dual})
                aggregate(result.loss_BT, batch.mask, "token_sum").backward()
                values = [x[batch.mask != 0].float() for x in result if x is not None]
                beyond = (batch.log_probs - batch.old_log_probs).abs() > 20
                if name in WITHOUT_RATIO:
                    beyond = batch.log_probs < -104
                if broken(values, log_probs.grad, (batch.mask == 0) | beyond):
                    bad.append((title, number, dual))
    print(bad)
    record_invariant(f"degenerate batches, policy loss {name}: broken", len(bad), 0)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl(estimator: str, record_invariant: Record) -> None:
    bad = []
    for title, batch in CASES.items():
        log_probs = batch.log_probs.clone().requires_grad_()
        values = kl(log_probs, batch.old_log_probs, batch.mask, estimator)
        values.sum().backward()
        beyond = (batch.log_probs - batch.old_log_probs).abs() > 20
        if broken([values], log_probs.grad, (batch.mask == 0) | beyond) or bool(values[batch.mask == 0].any()):
            bad.append(title)
    print(bad)
    record_invariant(f"degenerate batches, KL {estimator}: broken", len(bad), 0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_whole_objective(aggregation: str, record_invariant: Record) -> None:
    """With entropy, KL and weights, for every loss; nothing unmasked: loss and gradient are exactly 0."""
    bad = []
    for name in policy_loss.names:
        objective = Objective(policy_loss=name, aggregation=aggregation, entropy_coefficient=0.01, kl_coefficient=0.1)
        for title, batch in CASES.items():
            *_, advantages = signals(batch.mask)
            entropy = torch.where(batch.mask == 0, NAN, torch.full(batch.mask.shape, 0.5)).requires_grad_()
            log_probs = batch.log_probs.clone().requires_grad_()
            result = objective(log_probs, entropy, data_of(objective, batch, advantages), denominators(batch.mask))
            result.loss.backward()
            values = [result.loss, *result.sums.values(), *result.maxima.values()]
            wrong = broken(values, log_probs.grad, batch.mask == 0) or broken([], entropy.grad, batch.mask == 0)
            if wrong or (not batch.mask.any() and result.loss.item() != 0):
                bad.append((name, title))
    print(bad)
    record_invariant(f"degenerate batches, objective by {aggregation}: broken", len(bad), 0)


@pytest.mark.parametrize("name", policy_loss.names)
def test_junk_changes_nothing(name: str) -> None:
    """Not only finite: bit for bit what it is with 0 in the masked places."""
    objective = Objective(policy_loss=name, kl_coefficient=0.1, entropy_coefficient=0.1)

    def everything(junk: float) -> list[Tensor]:
        batch = with_junk(junk)
        log_probs = batch.log_probs.clone().requires_grad_()
        advantages = torch.where(batch.mask == 0, junk, torch.linspace(-3, 4, batch.mask.numel()).reshape(4, 4))
        data = data_of(objective, batch, advantages)
        data["correction_weights"] = torch.where(batch.mask == 0, junk, 0.5)
        result = objective(log_probs, batch.log_probs, data, denominators(batch.mask))
        result.loss.backward()
        assert log_probs.grad is not None
        return [log_probs.grad, result.loss.detach(), *result.sums.values(), *result.maxima.values()]

    clean = everything(0.0)
    for junk in (NAN, INF, -INF, 3e38):
        assert all(torch.equal(a, b) for a, b in zip(clean, everything(junk), strict=True)), junk


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_value_loss(aggregation: str, record_invariant: Record) -> None:
    """Values that left their old ones far behind, and returns far from both."""
    bad = []
    for clip in (0.2, None):
        objective = ValueObjective(clip, aggregation)
        for title, batch in CASES.items():
            masked = batch.mask == 0
            for size in (0.0, 1.0, 1e15):
                junk = torch.full(batch.mask.shape, NAN)
                values, old, returns = (torch.where(masked, junk, torch.full_like(junk, x)) for x in (size, -size, 0.5))
                values.requires_grad_()
                data = {"values": old, "returns": returns, "loss_mask": batch.mask}
                result = objective(values, data, denominators(batch.mask))
                result.loss.backward()
                numbers = [result.loss, *result.sums.values(), *result.maxima.values()]
                if broken(numbers, values.grad, masked) or (not batch.mask.any() and result.loss.item() != 0):
                    bad.append((title, clip, size))
    print(bad)
    record_invariant(f"degenerate batches, value loss by {aggregation}: broken", len(bad), 0)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_full_kl(direction: str, record_invariant: Record) -> None:
    """Tokens ruled out by one side or both, one token of vocabulary, huge logits, no rows, junk where masked."""
    ruled_out = torch.tensor([[0.0, -INF, 1.0], [-INF, 0.0, 1.0], [0.0, -INF, -INF]])
    cases = {
        "ruled out by the policy": (ruled_out, torch.zeros(3, 3)),
        "ruled out by the reference": (torch.zeros(3, 3), ruled_out),
        "ruled out by both": (ruled_out, ruled_out.flip(0)),
        "a vocabulary of one": (torch.ones(3, 1), torch.zeros(3, 1)),
        "huge logits": (torch.eye(3) * 3e38, -torch.eye(3) * 3e38),
        "no rows": (torch.zeros(0, 4), torch.zeros(0, 4)),
        "NaN": (torch.full((3, 3), NAN), torch.zeros(3, 3)),
        "inf": (torch.full((3, 3), INF), torch.full((3, 3), -INF)),
    }
    bad = []
    for title, (logits, ref) in cases.items():
        logits = logits.clone().requires_grad_()
        mask = torch.full((len(logits),), title not in ("NaN", "inf"))
        values = full_kl(logits, ref, direction=direction, mask_N=mask)
        values.sum().backward()
        if broken([values], logits.grad, ~mask) or bool((values < 0).any()) or bool(values[~mask].any()):
            bad.append(title)
    print(bad)
    record_invariant(f"degenerate batches, full KL {direction}: broken", len(bad), 0)
