"""Clipped loss, KL and ratios: formulas as in the papers, finite differences, and clamps without gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megarl.algorithms import kl
from megarl.algorithms.masking import log_ratio
from megarl.algorithms.policy_losses import vanilla

SEEDS = range(8)


def random_case(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (7, 5)
    old = -torch.rand(shape, generator=generator, dtype=dtype) * 3
    log_probs = old + torch.randn(shape, generator=generator, dtype=dtype)
    advantages = torch.randn(shape, generator=generator, dtype=dtype)
    mask = torch.rand(shape, generator=generator) < 0.7
    return log_probs, old, advantages, mask


@pytest.mark.parametrize("dual", [None, 1.5, 3.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_vanilla_is_the_papers_maximum_of_minima(seed: int, dual: float | None) -> None:
    log_probs, old, advantages, mask = random_case(seed)
    result = vanilla(log_probs, old, advantages, mask, clip_low=0.2, clip_high=0.28, clip_dual=dual)
    ratio = (log_probs - old).exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(0.8, 1.28)
    expected = torch.maximum(unclipped, clipped)
    if dual is not None:
        expected = torch.where(advantages < 0, torch.minimum(expected, -advantages * dual), expected)
    torch.testing.assert_close(result.loss_BT[mask], expected[mask])
    assert torch.equal(result.clipped_BT[mask], (clipped > unclipped)[mask])
    assert torch.equal(result.ratio_BT[~mask], torch.ones_like(ratio)[~mask])
    assert not result.loss_BT[~mask].any() and not result.clipped_BT[~mask].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_equal_finite_differences(seed: int) -> None:
    log_probs, old, advantages, mask = random_case(seed)
    log_probs.requires_grad_()

    def clipped(x: Tensor) -> Tensor:
        return vanilla(x, old, advantages, mask, clip_low=0.2, clip_high=0.28, clip_dual=3.0).loss_BT

    assert torch.autograd.gradcheck(clipped, (log_probs,))
    for estimator in ("k1", "k2", "k3", "abs"):
        assert torch.autograd.gradcheck(lambda x, e=estimator: kl(x, old, mask, e), (log_probs,))


@pytest.mark.parametrize("seed", SEEDS)
def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_is_the_policy_gradient(seed: int) -> None:
    log_probs, _, advantages, mask = random_case(seed, torch.float32)
    log_probs.requires_grad_()
    result = vanilla(log_probs, log_probs.detach(), advantages, mask)
    result.loss_BT.sum().backward()
    assert torch.equal(result.ratio_BT, torch.ones_like(result.ratio_BT))
    assert log_probs.grad is not None
    assert torch.equal(log_probs.grad, torch.where(mask, -advantages, 0.0))
    assert not result.clipped_BT.any()


def test_a_clamped_ratio_has_no_gradient() -> None:
    far = torch.tensor([[50.0, -50.0, math.inf, -math.inf, 19.0]], requires_grad=True)
    old, mask = torch.zeros(1, 5), torch.ones(1, 5)
    ratios = log_ratio(far, old, mask)
    assert ratios.tolist() == [[20.0, -20.0, 20.0, -20.0, 19.0]]
    ratios.exp().sum().backward()
    assert far.grad is not None
    assert far.grad[0, :4].tolist() == [0.0] * 4 and far.grad[0, 4] > 0
    for advantage in (-1.0, 1.0):
        for dual in (None, 3.0):
            far.grad = None
            result = vanilla(far, old, torch.full((1, 5), advantage), mask, clip_dual=dual)
            result.loss_BT.sum().backward()
            assert result.loss_BT.isfinite().all() and not far.grad[0, :4].any()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_kl_values(estimator: str) -> None:
    log_probs = torch.tensor([[-1.0, -2.0, -0.5, -3.0, -40.0]], dtype=torch.float64)
    ref = torch.tensor([[-1.5, -1.0, -0.5, math.nan, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0, 1.0]])
    d = [-0.5, 1.0, 0.0, None, 20.0]
    formula = {
        "k1": lambda x: -x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: min(math.exp(x) - x - 1, 10.0),
        "abs": abs,
    }[estimator]
    expected = torch.tensor([[0.0 if x is None else formula(x) for x in d]], dtype=torch.float64)
    torch.testing.assert_close(kl(log_probs, ref, mask, estimator), expected)
    alias = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "abs": "abs"}[estimator]
    assert torch.equal(kl(log_probs, ref, mask, alias), kl(log_probs, ref, mask, estimator))


def test_k3_is_never_negative_for_small_differences_in_float32() -> None:
    """exp(d) - d - 1 written out in float32 is noise of either sign, up to 1e-7, below |d| = 1e-4."""
    difference = torch.logspace(-12, 0, 4000)[None] * torch.tensor([[1.0], [-1.0]])
    zero = torch.zeros_like(difference)
    values = kl(zero, difference, torch.ones_like(zero), "k3")
    assert (values >= 0).all()
    exact = torch.expm1(difference.double()) - difference.double()
    torch.testing.assert_close(values.double(), exact, rtol=0, atol=1e-7)


def test_an_unknown_kl_is_refused() -> None:
    with pytest.raises(ValueError, match="no KL estimator 'k4'; there are k1, abs, k2, k3"):
        kl(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), "k4")


def test_half_precision_is_computed_in_float32() -> None:
    log_probs = torch.tensor([[-1.0]], dtype=torch.bfloat16, requires_grad=True)
    result = vanilla(log_probs, torch.tensor([[-1.125]]), torch.ones(1, 1), torch.ones(1, 1))
    assert result.loss_BT.dtype == torch.float32
    assert result.ratio_BT.item() == pytest.approx(math.exp(0.125), rel=1e-6)
