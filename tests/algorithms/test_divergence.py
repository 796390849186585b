"""KL: estimates and their straight-through forms, the exact value from logits, and the controllers of its coefficient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megarl.algorithms import kl
from megarl.algorithms.divergence import DIRECTIONS, KL_ESTIMATORS, full_kl
from megarl.algorithms.kl_control import AdaptiveKL, FixedKL, kl_controller

PLAIN = ("k1", "k2", "k3", "abs", "kl", "mse", "low_var_kl")


def random_case(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    log_probs, ref = -torch.rand(2, 6, 5, generator=g, dtype=torch.float64) * 3
    return log_probs, ref, torch.rand(6, 5, generator=g) < 0.7


@pytest.mark.parametrize("estimator", PLAIN)
def test_the_plus_form_has_the_value_of_its_own_and_the_gradient_of_k2(estimator: str) -> None:
    log_probs, ref, mask = random_case(1)
    x, y = (log_probs.clone().requires_grad_() for _ in range(2))
    values, k2 = kl(x, ref, mask, f"{estimator}+"), kl(y, ref, mask, "k2")
    torch.testing.assert_close(values, kl(log_probs, ref, mask, estimator), rtol=1e-12, atol=1e-12)
    values.sum().backward()
    k2.sum().backward()
    assert torch.equal(x.grad, y.grad) and y.grad.any()
    assert {estimator, f"{estimator}+"} <= set(KL_ESTIMATORS)


def test_over_all_samples_the_gradient_of_k2_is_the_gradient_of_the_exact_kl() -> None:
    """Expectation over the policy, by weighting every token of a vocabulary with its probability; k1's and k3's are not."""
    g = torch.Generator().manual_seed(0)
    logits, ref = torch.randn(2, 1, 7, generator=g, dtype=torch.float64)
    exact = logits.clone().requires_grad_()
    full_kl(exact, ref).sum().backward()
    off = {}
    for estimator in ("k1+", "k2", "k3+", "abs+", "k1", "k3"):
        z = logits.clone().requires_grad_()
        log_p, log_q = z.log_softmax(-1), ref.log_softmax(-1)
        estimates = kl(log_p, log_q, torch.ones_like(log_p), estimator)
        (estimates * log_p.detach().exp()).sum().backward()
        off[estimator] = float((z.grad - exact.grad).abs().max())
    assert all(off[name] < 1e-12 for name in ("k1+", "k2", "k3+", "abs+"))
    assert off["k1"] > 1e-2 and off["k3"] > 1e-2


def test_an_unknown_kl_is_refused() -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="no KL estimator 'k4'; there are k1, abs, k2, k3"):
        kl(x, x, x, "k4")
    with pytest.raises(ValueError, match="'full' is from logits: full_kl"):
        kl(x, x, x, "full")


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_full_kl_is_the_sum_over_the_vocabulary(direction: str, temperature: float) -> None:
    g = torch.Generator().manual_seed(3)
    logits, ref = 2 * torch.randn(2, 9, 13, generator=g, dtype=torch.float64)
    x, y = (logits.clone().requires_grad_() for _ in range(2))
    values = full_kl(x, ref, temperature=temperature, direction=direction)
    log_p, log_q = (z / temperature for z in (y, ref))
    log_p, log_q = log_p - log_p.logsumexp(-1, True), log_q - log_q.logsumexp(-1, True)
    plain = (log_p.exp() * (log_p - log_q) if direction == "reverse" else log_q.exp() * (log_q - log_p)).sum(-1)
    torch.testing.assert_close(values, plain, rtol=1e-12, atol=1e-14)
    weights = torch.randn(9, generator=g, dtype=torch.float64)
    (values * weights).sum().backward()
    (plain * weights).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-13)
    assert torch.autograd.gradcheck(lambda z: full_kl(z, ref, temperature=temperature, direction=direction), (x,))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_full_kl_edges(direction: str) -> None:
    logits = torch.tensor(
        [[1.0, 2.0, -math.inf], [0.0, 0.0, 0.0], [math.nan] * 3, [5e4, 0.0, -5e4]], requires_grad=True
    )
    ref = torch.tensor([[1.0, -math.inf, 2.0], [0.0, 0.0, 0.0], [math.inf] * 3, [-5e4, 0.0, 5e4]])
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0])
    values = full_kl(logits, ref, direction=direction, mask_N=mask)
    values.sum().backward()
    assert values.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()
    assert values[1] == 0 and values[2] == 0 and not logits.grad[1:3].any() and values[0] > 100
    assert full_kl(logits[:0], ref[:0], direction=direction).shape == (0,)
    half = full_kl(logits[1:2].bfloat16(), ref[1:2].bfloat16(), direction=direction)
    assert half.dtype == torch.float32


def test_full_kl_keeps_nothing_but_its_inputs() -> None:
    """What the graph holds between forward and backward is what the caller gave."""
    held = []
    logits = torch.randn(4, 11, requires_grad=True)
    ref = torch.randn(4, 11)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x.data_ptr()) or x, lambda x: x):
        full_kl(logits, ref).sum()
    assert set(held) <= {logits.data_ptr(), ref.data_ptr()} and held


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": "up"}, "direction is 'up'"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be above 0"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"mask_N": torch.ones(1, 1)}, r"mask_N is \(1, 1\), logits_NV is \(1, 2\); it must be \(1,\)"),
    ],
)
def test_full_kl_refuses(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        full_kl(torch.zeros(1, 2), torch.zeros(1, 2), **options)
    with pytest.raises(ValueError, match=r"\(1, 2\) and \(1, 3\)"):
        full_kl(torch.zeros(1, 2), torch.zeros(1, 3))


def test_the_adaptive_controller_is_the_papers() -> None:
    controller = AdaptiveKL(0.1, target=6.0, horizon=1000)
    controller.update(6.6, samples=100)  # a tenth too much: e = 0.1, gain 0.1
    assert controller.coefficient == pytest.approx(0.1 * 1.01)
    controller.update(600.0, samples=100)  # e is held at 0.2
    assert controller.coefficient == pytest.approx(0.1 * 1.01 * 1.02)
    controller.update(0.0, samples=10**9)  # more than the horizon at once: a fifth, no more
    assert controller.coefficient == pytest.approx(0.1 * 1.01 * 1.02 * 0.8)
    state = controller.state_dict()
    resumed = AdaptiveKL(0.1, target=6.0, horizon=1000)
    resumed.load_state_dict(state)
    assert resumed.coefficient == controller.coefficient


def test_the_adaptive_controller_finds_its_target() -> None:
    """A policy whose KL falls as the coefficient rises: KL = 1 / coefficient."""
    controller = AdaptiveKL(1.0, target=4.0, horizon=100)
    for _ in range(300):
        controller.update(1 / controller.coefficient, samples=50)
    assert controller.coefficient == pytest.approx(0.25, rel=1e-3)


def test_the_fixed_controller_and_the_choice() -> None:
    fixed = kl_controller(0.3)
    fixed.update(1e9, samples=100)
    fixed.load_state_dict({"coefficient": 7.0})
    assert isinstance(fixed, FixedKL) and fixed.coefficient == 0.3 and fixed.state_dict() == {"coefficient": 0.3}
    assert isinstance(kl_controller(0.3, target=1.0), AdaptiveKL)
    for arguments, message in [
        ((-0.1,), "coefficient of the KL controller is -0.1; it must be at least 0"),
        ((0.0, 1.0), "coefficient of the KL controller is 0.0; it must be above 0"),
        ((1e-13, 1.0), "coefficient of the KL controller is 1e-13; it must be at least 1e-12 and at most 1e"),
        (("0.1",), "coefficient of the KL controller is '0.1'; it must be a finite number at least 0"),
        ((0.1, 1.0, math.inf), "horizon of the KL controller is inf"),
        ((0.1, 0.0), "target of the KL controller is 0.0; it must be above 0"),
        ((0.1, 1.0, 0.5), "horizon of the KL controller is 0.5; it must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            kl_controller(*arguments)
    with pytest.raises(ValueError, match="given a KL of nan"):
        AdaptiveKL(0.1, 1.0, 10).update(math.nan, 1)
    with pytest.raises(ValueError, match="samples of the KL controller is -1; it must be at least 0"):
        AdaptiveKL(0.1, 1.0, 10).update(2.0, -1)
    for state, message in (({}, "the state of the KL controller is {}"), ({"coefficient": math.nan}, "is nan")):
        with pytest.raises(ValueError, match=message):
            AdaptiveKL(0.1, 1.0, 10).load_state_dict(state)


def test_a_steered_coefficient_always_comes_back() -> None:
    """Thousands of steps on one side: it neither overflows nor sinks to where a fifth more rounds to the same."""
    controller = AdaptiveKL(0.1, target=1.0, horizon=1)
    for kl_value, end in ((100.0, 1e12), (0.0, 1e-12)):
        for _ in range(5000):
            controller.update(kl_value, samples=1)
        assert controller.coefficient == end
        controller.update(1.1, samples=1)
        assert controller.coefficient == pytest.approx(min(end * 1.1, 1e12))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_is_no_distribution_is_not_hidden(direction: str) -> None:
    logits = torch.tensor([[math.inf, 0.0], [-math.inf, -math.inf], [math.nan, 0.0], [0.0, 0.0]])
    assert full_kl(logits, torch.zeros(4, 2), direction=direction).isnan().tolist() == [True, True, True, False]


def test_a_token_that_the_reference_rules_out_costs_ten_thousand_nats() -> None:
    ruled_out = torch.tensor([[0.0, -math.inf]], dtype=torch.float64)
    even = torch.zeros(1, 2, dtype=torch.float64)
    for value in (full_kl(even, ruled_out), full_kl(ruled_out, even, direction="forward")):
        assert value.item() == pytest.approx(5000 - math.log(2), rel=1e-12)
