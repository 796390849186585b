"""Every policy loss against its paper's formula in float64: values, and gradients by finite differences of the formula.

The formulas are written here a second time, plainly. Where a paper stops the gradient (sg), the formula takes that part at
the fixed point x0, so that its finite differences are the gradient that the paper means.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megarl.algorithms import call
from megarl.algorithms.aggregation import aggregate
from megarl.algorithms.policy_losses import policy_loss

LOW, HIGH, DUAL = 0.2, 0.28, 1.8
SEEDS = range(4)


class Case(NamedTuple):
    x0: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    behaviour: Tensor
    selected: Tensor


def random_case(seed: int, rows: int = 5, columns: int = 4) -> Case:
    g = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, columns, generator=g, dtype=torch.float64)

    old = -torch.rand(rows, columns, generator=g, dtype=torch.float64) * 2 - 0.3
    x0 = (old + 0.4 * normal()).clamp(max=-0.02)
    mask = torch.rand(rows, columns, generator=g) < 0.75
    selected = torch.rand(rows, columns, generator=g) < 0.4
    return Case(x0, old, normal(), mask, old + 0.3 * normal(), selected)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def ppo(x: Tensor, c: Case, dual: float | None = DUAL) -> Tensor:
    r, a = (x - c.old).exp(), c.advantages
    loss = torch.maximum(-a * r, -a * r.clamp(1 - LOW, 1 + HIGH))
    return loss if dual is None else torch.where(a < 0, torch.minimum(loss, -a * dual), loss)


def geo_mean(x: Tensor, c: Case) -> Tensor:
    d, a = x - c.old, c.advantages
    held = torch.where(a > 0, d.clamp(max=HIGH), d.clamp(min=-LOW))
    loss = -sequence_mean(a, c.mask) * sequence_mean(held, c.mask).exp()
    return loss.expand_as(x)


def gspo(x: Tensor, c: Case) -> Tensor:
    s = sequence_mean(c.x0 - c.old, c.mask).exp() * (x - c.x0).exp()
    return torch.maximum(-c.advantages * s, -c.advantages * s.clamp(1 - LOW, 1 + HIGH))


def cispo(x: Tensor, c: Case) -> Tensor:
    return -(c.x0 - c.old).exp().clamp(1 - LOW, 1 + HIGH) * c.advantages * x


def sapo(x: Tensor, c: Case) -> Tensor:
    tau = 2.1 - (c.advantages > 0).double() * 0.8
    return -c.advantages * 4 / tau * torch.sigmoid(tau * ((x - c.old).exp() - 1))


def dppo_tv(x: Tensor, c: Case) -> Tensor:
    change = c.x0.exp() - c.old.exp()
    allowed = torch.where(c.advantages > 0, change <= HIGH / 4, change >= -LOW / 4)
    return -allowed.double() * (c.x0 - c.old).exp().clamp(max=1.3) * c.advantages * x


def dppo_kl(x: Tensor, c: Case) -> Tensor:
    p, q = c.old.exp(), c.x0.exp()
    divergence = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    on = torch.where(c.advantages > 0, (q > p) & (divergence > HIGH / 4), (q < p) & (divergence > LOW / 4))
    return -(~on).double() * (c.x0 - c.old).exp().clamp(max=1.3) * c.advantages * x


Formula = Callable[[Tensor, Case], Tensor]
QUARTER = {"clip_low": LOW / 4, "clip_high": HIGH / 4, "truncate": 1.3}
FORMULAS: dict[str, tuple[Formula, dict[str, Any]]] = {
    "vanilla": (ppo, {"clip_dual": DUAL}),
    "reinforce": (lambda x, c: -c.advantages * x, {}),
    "gpg": (lambda x, c: -c.advantages * x, {}),
    "clip_cov": (lambda x, c: torch.where(c.selected, 0.0, ppo(x, c, None)), {}),
    "kl_cov": (
        lambda x, c: -c.advantages * (x - c.old).exp() + c.selected.double() * 0.7 * (x - c.old).abs(),
        {"kl_weight": 0.7},
    ),
    "geo_mean": (geo_mean, {}),
    "gspo": (gspo, {}),
    "gspo_token": (gspo, {}),
    "cispo": (cispo, {}),
    "sapo": (sapo, {"tau_positive": 1.3, "tau_negative": 2.1}),
    "dppo_tv": (dppo_tv, QUARTER),
    "dppo_kl": (dppo_kl, QUARTER),
    "dro": (lambda x, c: -c.advantages * x + 0.3 / 2 * (x - c.old).square(), {"beta": 0.3}),
    "decoupled": (
        lambda x, c: torch.where((c.old - c.behaviour).exp() <= 1.4, (c.old - c.behaviour).exp(), 0.0) * ppo(x, c),
        {"clip_dual": DUAL, "behaviour_cap": 1.4},
    ),
}


def evaluate(name: str, x: Tensor, c: Case, **options: Any) -> Any:
    offered = {"log_probs_BT": x, "old_log_probs_BT": c.old, "advantages_BT": c.advantages, "mask_BT": c.mask}
    offered |= {"behaviour_log_probs_BT": c.behaviour, "selected_BT": c.selected}
    return call(policy_loss.get(name), {**offered, "clip_low": LOW, "clip_high": HIGH, **options})


def test_every_loss_has_its_formula_here() -> None:
    assert set(policy_loss.names) == set(FORMULAS)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_gradient(name: str, seed: int) -> None:
    formula, options = FORMULAS[name]
    c = random_case(seed)
    x = c.x0.clone().requires_grad_()
    result = evaluate(name, x, c, **options)
    torch.testing.assert_close(result.loss_BT[c.mask], formula(c.x0, c)[c.mask], rtol=1e-12, atol=1e-12)
    mode = policy_loss.traits(name).aggregation
    aggregate(result.loss_BT, c.mask, mode).backward()
    step = 1e-6
    expected = torch.zeros_like(c.x0)
    for at in c.mask.nonzero().tolist():
        moved = torch.zeros_like(c.x0)
        moved[tuple(at)] = step
        above, below = (aggregate(formula(c.x0 + sign * moved, c), c.mask, mode) for sign in (1, -1))
        expected[tuple(at)] = (above - below) / (2 * step)
    torch.testing.assert_close(x.grad, expected, rtol=1e-6, atol=1e-8)
    assert expected.any()


@pytest.mark.parametrize("name", FORMULAS)
def test_on_policy_the_gradient_is_the_policy_gradient(name: str) -> None:
    """Ratio exactly 1: -A of each token, float32, with whatever clip. One advantage a sequence, for sequence losses."""
    c = random_case(7)
    old = c.old.float()
    advantages = c.advantages[:, :1].expand_as(c.mask).float().contiguous()
    c = Case(old, old, advantages, c.mask, old, torch.zeros_like(c.mask))
    x = old.clone().requires_grad_()
    result = evaluate(name, x, c)
    aggregate(result.loss_BT, c.mask, "token_sum").backward()
    torch.testing.assert_close(x.grad, torch.where(c.mask, -advantages, 0.0), rtol=1e-6, atol=0)
    if result.ratio_BT is not None:
        assert torch.equal(result.ratio_BT[c.mask], torch.ones_like(old)[c.mask])
    assert result.clipped_BT is None or not result.clipped_BT.any()
    assert result.dual_clipped_BT is None or not result.dual_clipped_BT.any()


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_with_one_advantage_a_sequence_is_the_papers_sequence_form(seed: int) -> None:
    """Equation 5, with the gradient through the sequence's ratio itself."""
    c = random_case(seed)
    c = c._replace(advantages=c.advantages[:, :1].expand_as(c.mask))
    x, y = (c.x0.clone().requires_grad_() for _ in range(2))
    aggregate(evaluate("gspo", x, c).loss_BT, c.mask, "seq_mean_token_mean").backward()
    ratio = sequence_mean(y - c.old, c.mask).exp()[:, 0]
    advantage = c.advantages[:, 0]
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - LOW, 1 + HIGH))
    loss[c.mask.any(-1)].sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
def test_inputs_are_never_changed(name: str) -> None:
    c = random_case(3)
    copies = [x.clone() for x in c]
    x = c.x0.clone().requires_grad_()
    aggregate(evaluate(name, x, c).loss_BT, c.mask, "token_sum").backward()
    assert torch.equal(x.detach(), c.x0) and all(torch.equal(a, b) for a, b in zip(c, copies, strict=True))


@pytest.mark.parametrize("name", FORMULAS)
def test_half_precision_is_computed_in_float32(name: str) -> None:
    c = Case(*(x.bfloat16() if x.is_floating_point() else x for x in random_case(5)))
    x, y = c.x0.clone().requires_grad_(), c.x0.float().requires_grad_()
    loss, exact = (evaluate(name, z, c).loss_BT for z in (x, y))
    assert loss.dtype == torch.float32 and torch.equal(loss[c.mask], exact[c.mask])
    for value in (loss, exact):
        aggregate(value, c.mask, "token_sum").backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x.grad.float(), y.grad, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("name", FORMULAS)
def test_an_unmasked_nan_is_not_hidden(name: str) -> None:
    """Somebody's bug: it must reach the loss, where the engine sees it."""
    c = random_case(2)
    x = c.x0.clone()
    x[tuple(c.mask.nonzero()[0])] = math.nan
    loss = evaluate(name, x, c._replace(selected=torch.zeros_like(c.mask))).loss_BT
    assert aggregate(loss, c.mask, "token_sum").isnan()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [("dro", {"beta": 0}, "beta is 0"), ("sapo", {"tau_negative": -1.0}, "tau_negative is -1.0; it must be above 0")],
)
def test_impossible_options_are_refused(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(name, random_case(0).x0, random_case(0), **options)


def one_token(name: str, log_prob: float, old: float, advantage: float = 1.0, **more: Any) -> tuple[Any, float]:
    """Result and gradient of a single token."""
    x = torch.tensor([[log_prob]], dtype=torch.float64, requires_grad=True)
    filled = [torch.full_like(x, value).detach() for value in (old, advantage, more.pop("behaviour", old))]
    result = evaluate(name, x, Case(x, *filled[:2], torch.ones(1, 1), filled[2], torch.zeros(1, 1)), **more)
    result.loss_BT.sum().backward()
    assert x.grad is not None
    return result, x.grad.item()


@pytest.mark.parametrize("name", ["reinforce", "gpg", "cispo", "dro", "dppo_tv", "dppo_kl"])
def test_a_log_prob_counts_as_minus_104_at_least(name: str) -> None:
    """What float32 holds as a probability, down to e^-104, is taken as it is."""
    for log_prob, held in ((-80.0, -80.0), (-103.9, -103.9), (-120.0, -104.0), (-1e30, -104.0)):
        result, slope = one_token(name, log_prob, log_prob)
        assert result.loss_BT.item() == pytest.approx(-held)
        if name in ("reinforce", "gpg"):
            assert slope == (-1.0 if held == log_prob else 0.0)


def test_a_behaviour_weight_beyond_the_limit_of_ratios_is_none() -> None:
    """The limit is no weight: a token that the engine all but ruled out does not take part, cap or no cap."""
    for behaviour in (-60.0, 60.0):
        for cap in (None, 1e300):
            result, slope = one_token("decoupled", -1.0, -1.0, behaviour=behaviour, behaviour_cap=cap)
            assert result.loss_BT.item() == 0.0 and slope == 0.0
    result, slope = one_token("decoupled", -1.0, -1.0, behaviour=-11.0)
    assert slope == pytest.approx(-math.exp(10))


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_a_token_outside_the_trust_region_is_not_counted_as_truncated_too(name: str) -> None:
    inside = {"clip_low": 10.0, "clip_high": 10.0, "truncate": 2.0}
    result, slope = one_token(name, -0.5, -3.0, **inside)
    assert result.dual_clipped_BT.item() and not result.clipped_BT.item() and slope == -2.0
    result, slope = one_token(name, -0.5, -3.0, **inside | {"clip_high": 0.01})
    assert result.clipped_BT.item() and not result.dual_clipped_BT.item() and slope == 0.0
