"""Off-policy diagnostics against their definitions in float64, and where the definitions have nothing to say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.diagnostics import off_policy_diagnostics

NAN, INF = math.nan, math.inf
many = settings(max_examples=60, deadline=None)


def random_case(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of two policies and a mask with holes and empty rows, float64."""
    generator = np.random.default_rng(seed)
    shape = int(generator.integers(1, 9)), int(generator.integers(1, 7))
    behaviour = torch.from_numpy(-generator.exponential(1.0, shape))
    other = torch.from_numpy(-generator.exponential(1.0, shape))
    mask = torch.from_numpy(generator.random(shape) < generator.choice([0.6, 1.0]))
    mask[generator.random(shape[0]) < 0.2] = False
    return torch.lerp(behaviour, other, float(generator.choice([0.01, 1.0]))), behaviour, mask


def loop_diagnostics(p: Tensor, q: Tensor, mask: Tensor) -> dict[str, float]:
    """One token after another."""
    rows = [
        [(float(p[b, t]), float(q[b, t])) for t in range(mask.shape[1]) if mask[b, t]] for b in range(mask.shape[0])
    ]
    rows = [row for row in rows if row]
    pairs = [pair for row in rows for pair in row]
    d = np.array([a - b for a, b in pairs])
    totals = np.array([math.fsum(a - b for a, b in row) for row in rows])
    mean_p, mean_q = (np.array([math.fsum(pair[i] for pair in row) / len(row) for row in rows]) for i in (0, 1))
    distances = sorted(abs(d))
    probabilities = np.exp(np.array(pairs))
    spread = probabilities.std(axis=0)
    varied = len(pairs) > 1 and bool((spread > 0).all())
    same = float((probabilities[:, 0] == probabilities[:, 1]).all())
    return {
        "kl": float((-d).mean()),
        "k3": float((np.exp(d) - d - 1).mean()),
        "chi2_token": float(np.exp(d * 2).mean() - 1),
        "chi2_sequence": float(np.exp(totals * 2).mean() - 1),
        "effective_sample_size": float(np.exp(d).sum() ** 2 / (len(d) * np.exp(2 * d).sum())),
        "effective_sample_size_sequence": float(np.exp(totals).sum() ** 2 / (len(rows) * np.exp(2 * totals).sum())),
        "perplexity": float(np.exp(-mean_p).mean()),
        "behaviour_perplexity": float(np.exp(-mean_q).mean()),
        "perplexity_ratio": float(np.exp(mean_q - mean_p).mean()),
        "abs_mean": float(abs(d).mean()),
        "abs_max": distances[-1],
        "pearson": float(np.corrcoef(probabilities.T)[0, 1]) if varied else same,
        # The smallest value that so many per cent of all do not exceed.
        **{
            f"abs_p{percent}": next(v for i, v in enumerate(distances) if 100 * (i + 1) >= percent * len(distances))
            for percent in (50, 90, 99)
        },
    }


NOTHING = {
    name: 1.0 if "perplexity" in name or "effective" in name or name == "pearson" else 0.0
    for name in loop_diagnostics(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1))
}


@many
@given(seed=st.integers(0, 10**6))
def test_equals_a_plain_loop(seed: int) -> None:
    p, q, mask = random_case(seed)
    expected = loop_diagnostics(p, q, mask) if mask.any() else dict(NOTHING)
    result = off_policy_diagnostics(p, q, mask)
    assert result == pytest.approx(expected, rel=1e-9, abs=1e-9)
    single = off_policy_diagnostics(p.float(), q.float(), mask)
    del expected["pearson"], single["pearson"]  # of two points it is 1 or -1, by a last digit
    assert single == pytest.approx(expected, rel=1e-3, abs=1e-5)


@many
@given(seed=st.integers(0, 10**6), junk=st.sampled_from([NAN, INF, -INF, 3e38]))
def test_order_padding_and_junk_do_not_matter(seed: int, junk: float) -> None:
    p, q, mask = random_case(seed)
    plain = off_policy_diagnostics(p, q, mask)
    assert off_policy_diagnostics(torch.where(mask, p, junk), torch.where(mask, q, -junk), mask) == plain
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(mask)))
    assert off_policy_diagnostics(p[order], q[order], mask[order]) == pytest.approx(plain, rel=1e-9, abs=1e-12)
    wide = [torch.nn.functional.pad(x, (1, 2), value=fill) for x, fill in ((p, junk), (q, junk), (mask, False))]
    assert off_policy_diagnostics(*wide) == pytest.approx(plain, rel=1e-9, abs=1e-12)


def test_the_same_policy_is_at_distance_zero_exactly() -> None:
    p, _, mask = random_case(1)
    result = off_policy_diagnostics(p.float(), p.float(), mask)
    distances = [name for name, value in NOTHING.items() if value == 0.0]
    assert all(result[name] == 0.0 for name in distances)
    assert result["perplexity_ratio"] == 1.0 and result["perplexity"] == result["behaviour_perplexity"]
    assert result["effective_sample_size"] == pytest.approx(1.0) and result["pearson"] == pytest.approx(1.0)


def test_close_policies_are_not_lost_in_rounding() -> None:
    """chi^2 of ratios 1 + 1e-4 and 1 - 1e-4 is 1e-8, below what float32 resolves beside 1."""
    q = torch.full((1, 2), -1.0, dtype=torch.float64)
    p = q + torch.tensor([[1e-4, -1e-4]], dtype=torch.float64).log1p()
    result = off_policy_diagnostics(p - q, q * 0, torch.ones(1, 2))
    drift = (p - q).float()
    single = off_policy_diagnostics(drift, drift * 0, torch.ones(1, 2))
    assert result["chi2_token"] == pytest.approx(1e-8, rel=1e-3)
    assert single["chi2_token"] == pytest.approx(1e-8, rel=2e-2)


@pytest.mark.parametrize(("p", "q"), [(-INF, -1.0), (-1.0, -INF), (-3e38, -1.0), (0.5, -0.5), (INF, -1.0)])
def test_extremes_are_finite(p: float, q: float) -> None:
    log_p, log_q = torch.tensor([[p, -1.0, -2.0]]), torch.tensor([[q, -1.0, -2.0]])
    result = off_policy_diagnostics(log_p, log_q, torch.ones(1, 3))
    assert all(math.isfinite(value) for value in result.values())
    assert result["abs_max"] <= 20 and result["perplexity"] <= math.exp(20) * 1.001


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_nothing_unmasked_is_what_equal_policies_have(shape: tuple[int, int]) -> None:
    assert off_policy_diagnostics(torch.full(shape, NAN), torch.zeros(shape), torch.zeros(shape)) == NOTHING


@pytest.mark.parametrize(("p", "q", "pearson"), [(-1.0, -1.0, 1.0), (-1.0, -2.0, 0.0)])
def test_a_correlation_without_spread(p: float, q: float, pearson: float) -> None:
    """0.1 is what a mean of three is not exactly: no spread must stay no spread."""
    log_p, log_q = torch.full((1, 3), p * 0.1), torch.full((1, 3), q * 0.1)
    assert off_policy_diagnostics(log_p, log_q, torch.ones(1, 3))["pearson"] == pearson


def test_mixed_dtypes_and_untouched_inputs() -> None:
    p, q, mask = random_case(2)
    inputs = [p.requires_grad_(), q.to(torch.bfloat16), mask.float()]
    before = [x.detach().clone() for x in inputs]
    assert all(type(value) is float for value in off_policy_diagnostics(*inputs).values())
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, inputs, strict=True))


def test_what_is_not_defined_is_named() -> None:
    ones = torch.ones(1, 2)
    with pytest.raises(
        ValueError, match="token 1 of sample 0 has -inf in log_probs_BT and -inf in behaviour_log_probs_BT"
    ):
        off_policy_diagnostics(torch.tensor([[0.0, -INF]]), torch.tensor([[0.0, -INF]]), ones)
    with pytest.raises(ValueError, match=r"behaviour_log_probs_BT is \(2, 1\), the mask is \(1, 2\)"):
        off_policy_diagnostics(ones, ones.T, ones)
