"""Returns and GAE against a naive loop over tokens in float64; whitening against its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms import rows
from megarl.algorithms.advantages import gae, reinforce_plus_plus, remax
from megarl.algorithms.scan import decaying_sum, discounted_sums, over_tokens
from megarl.algorithms.whitening import masked_whiten, weighted_whiten

many = settings(max_examples=50, deadline=None)
seeds = st.integers(0, 2**32 - 1)
fractions = st.sampled_from([0.0, 1e-3, 0.1, 0.5, 0.9, 0.95 * 0.99, 0.999, 1.0])


def random_case(seed: int, tokens: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values and a mask: of padding only, with holes, or with whole rows masked."""
    generator = np.random.default_rng(seed)
    shape = int(generator.integers(1, 6)), tokens or int(generator.integers(1, 200))
    reward, value = (torch.from_numpy(generator.normal(size=shape).astype(np.float32)) for _ in range(2))
    mask = torch.arange(shape[1]) < torch.from_numpy(generator.integers(0, shape[1] + 1, (shape[0], 1)))
    if seed % 2:
        mask = mask & torch.from_numpy(generator.random(shape) < generator.choice([0.05, 0.5, 0.95]))
    return reward, value, mask


def loop_sums(values: Tensor, mask: Tensor, decay: float) -> Tensor:
    running, result = torch.zeros(len(values), dtype=torch.float64), torch.zeros(values.shape, dtype=torch.float64)
    for t in reversed(range(values.shape[1])):
        running = torch.where(mask[:, t], values[:, t].double() + decay * running, running)
        result[:, t] = torch.where(mask[:, t], running, 0)
    return result


def loop_gae(reward: Tensor, value: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    after, ahead = (torch.zeros(len(value), dtype=torch.float64) for _ in range(2))
    advantages = torch.zeros(value.shape, dtype=torch.float64)
    for t in reversed(range(value.shape[1])):
        delta = reward[:, t].double() + gamma * after - value[:, t].double()
        ahead = torch.where(mask[:, t], delta + gamma * lam * ahead, ahead)
        after = torch.where(mask[:, t], value[:, t].double(), after)
        advantages[:, t] = torch.where(mask[:, t], ahead, 0)
    return advantages, torch.where(mask, advantages + value, 0)


def close(ours: Tensor, expected: Tensor) -> None:
    """To 1e-5 of the largest: sums of many terms of either sign are that exact, not each by itself."""
    assert ours.dtype == torch.float32
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-5 * scale)


def close_whitened(ours: Tensor, values: Tensor, mask: Tensor) -> None:
    """Of values in float64. What differs little is known less well in float32, and is made as large as all else."""
    kept = values[mask]
    expected = masked_whiten(values, mask)
    spread = float(kept.std()) if len(kept) > 1 else 0.0
    noise = 1e-6 * max(1.0, float(kept.abs().max())) / max(spread, 1e-4) if len(kept) else 0.0
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5 + noise)


@many
@given(seeds, fractions)
def test_discounted_sums_equal_a_loop(seed: int, decay: float) -> None:
    reward, _, mask = random_case(seed)
    close(discounted_sums(reward, mask, decay), loop_sums(reward, mask, decay))


@many
@given(seeds, fractions, fractions)
def test_gae_equals_a_loop(seed: int, gamma: float, lam: float) -> None:
    reward, value, mask = random_case(seed)
    expected = loop_gae(reward, value, mask, gamma, lam)
    result = gae(reward, mask, value, gamma=gamma, lam=lam, whiten=False)
    close(result.advantages_BT, expected[0])
    close(result.returns_BT, expected[1])
    whitened = gae(reward, mask, value, gamma=gamma, lam=lam)
    close_whitened(whitened.advantages_BT, expected[0], mask)
    close(whitened.returns_BT, expected[1])


@many
@given(seeds, fractions)
def test_reinforce_plus_plus_carries_over_observations(seed: int, gamma: float) -> None:
    reward, _, mask = random_case(seed | 1)  # with holes
    expected = loop_sums(reward, mask, gamma)
    result = reinforce_plus_plus(reward, mask, gamma=gamma)
    close(result.returns_BT, expected)
    close_whitened(result.advantages_BT, expected, mask)
    assert torch.equal(reinforce_plus_plus(reward, mask, gamma=gamma, whiten=False).advantages_BT, result.returns_BT)


def test_an_observation_costs_no_discount() -> None:
    reward = torch.tensor([[0.0, 9.0, 9.0, 1.0]])
    mask = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    assert reinforce_plus_plus(reward, mask, gamma=0.5).returns_BT.tolist() == [[0.5, 0.0, 0.0, 1.0]]
    value = torch.tensor([[0.25, 9.0, 9.0, 0.5]])
    result = gae(reward, mask, value, gamma=0.5, lam=0.5, whiten=False)
    # delta at the end 1 - 0.5, at the start 0.5 * 0.5 - 0.25 = 0
    assert result.advantages_BT.tolist() == [[0.125, 0.0, 0.0, 0.5]]


@many
@given(seeds)
def test_remax_is_the_reward_to_go_less_the_baseline(seed: int) -> None:
    reward, value, mask = random_case(seed)
    baseline = value[:, 0]
    returns = loop_sums(reward, mask, 1.0)
    result = remax(reward, mask, torch.where(mask.any(-1), baseline, float("nan")))
    close(result.returns_BT, returns)
    close(result.advantages_BT, torch.where(mask, returns - baseline[:, None], 0))


@pytest.mark.parametrize("decay", [0.3, 0.9999, 1.0])
def test_long_sequences(decay: float) -> None:
    reward, value, mask = random_case(5, 32768)
    mask[0], reward[0] = True, reward[0].abs()  # the sum grows to 26,000
    close(discounted_sums(reward, mask, decay), loop_sums(reward, mask, decay))
    result = gae(reward, mask, value, gamma=decay, lam=0.95, whiten=False)
    close(result.advantages_BT, loop_gae(reward, value, mask, decay, 0.95)[0])


def test_float64_stays() -> None:
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 500)))
    mask = torch.ones(3, 500, dtype=torch.bool)
    torch.testing.assert_close(discounted_sums(values, mask, 0.97), loop_sums(values, mask, 0.97), rtol=0, atol=1e-12)


def test_a_long_sequence_among_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, each as wide as its own longest: the result does not depend on where they are cut."""
    generator = np.random.default_rng(3)
    reward = torch.from_numpy(generator.normal(size=(40, 700)).astype(np.float32))
    mask = torch.arange(700) < torch.from_numpy(generator.integers(0, 30, (40, 1)))
    mask[17] = True
    mask[3, 5] = False
    whole = discounted_sums(reward, mask, 0.9), masked_whiten(reward, mask), rows.masked_sums(reward, mask)
    monkeypatch.setattr(rows, "ELEMENTS", 2100)
    widths: list[int] = []

    def formula(x: Tensor) -> tuple[Tensor]:
        widths.append(x.shape[1])
        return (decaying_sum(x, 0.9),)

    close(over_tokens(formula, (reward,), mask)[0], loop_sums(reward, mask, 0.9))
    assert len(widths) == 14 and sum(width > 100 for width in widths) == 1
    torch.testing.assert_close(discounted_sums(reward, mask, 0.9), whole[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(masked_whiten(reward, mask), whole[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rows.masked_sums(reward, mask), whole[2], rtol=1e-6, atol=1e-6)


@many
@given(seeds, st.booleans())
def test_whitening_is_its_definition(seed: int, shift_mean: bool) -> None:
    x, _, mask = random_case(seed)
    kept = x.double()[mask]
    expected = torch.zeros(x.shape, dtype=torch.float64)
    if len(kept):
        variance = kept.var() if len(kept) > 1 else torch.tensor(0.0)
        expected[mask] = (kept - kept.mean()) / (variance + 1e-8).sqrt() + (0.0 if shift_mean else kept.mean())
    whitened = masked_whiten(x.double(), mask, shift_mean=shift_mean)
    torch.testing.assert_close(whitened, expected, rtol=1e-9, atol=1e-9)
    if shift_mean:
        close_whitened(masked_whiten(x, mask), x.double(), mask)
    junk = torch.where(mask, x, float("nan"))
    assert torch.equal(masked_whiten(junk, mask), masked_whiten(x, mask))


@many
@given(seeds)
def test_weights_are_repetitions(seed: int) -> None:
    generator = np.random.default_rng(seed)
    values = torch.from_numpy(generator.normal(size=9))
    weight = torch.from_numpy(generator.integers(0, 5, 9))
    mask = torch.arange(5) < weight[:, None]
    expected = masked_whiten(values[:, None].expand(9, 5), mask).amax(-1) * (weight > 0)
    lowest = masked_whiten(values[:, None].expand(9, 5), mask).amin(-1)
    ours = weighted_whiten(values, weight)
    torch.testing.assert_close(ours, torch.where(ours < 0, lowest, expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("value", [0.1, -1 / 3, 12345.678, 1e-30, 1e30])
def test_equal_values_are_whitened_to_exactly_zero(value: float) -> None:
    x, mask = torch.full((7, 33), value), torch.ones(7, 33)
    assert not masked_whiten(x, mask).any()
    assert not weighted_whiten(x[:, 0], mask.sum(-1)).any()


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e15, 1e25, 1e37])
def test_whitening_does_not_overflow(size: float) -> None:
    x = torch.tensor([[1.0, -1.0], [1.0, -1.0]]) * size
    expected = (0.75**0.5 if size >= 1 else 0.0) * x.sign()
    torch.testing.assert_close(masked_whiten(x, torch.ones(2, 2)), expected)
    torch.testing.assert_close(weighted_whiten(x.flatten(), torch.ones(4)), expected.flatten())


@pytest.mark.parametrize("argument", ["gamma", "lam"])
@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_a_discount_is_a_fraction(argument: str, value: float) -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match=f"{argument} is {value}; it must lie in 0..1"):
        gae(one, one, one, **{argument: value})


@many
@given(seeds)
def test_rows_are_counted_and_summed_whatever_their_layout(seed: int) -> None:
    """Slices, transposed, of any width: eight bytes at a time is not how all masks lie."""
    generator = np.random.default_rng(seed)
    whole = torch.from_numpy(generator.random((9, int(generator.integers(1, 2100)))) < generator.random())
    values = torch.from_numpy(generator.integers(-9, 9, whole.shape).astype(np.float32)) / 4
    first, last = sorted(generator.integers(0, whole.shape[1] + 1, 2).tolist())
    for mask, x in (
        (whole, values),
        (whole[3:4, first:last], values[3:4, first:last]),
        (whole[:, 1:].T, values[:, 1:].T),
    ):
        assert rows.unmasked(mask).equal(mask.sum(-1).float())
        assert rows.any_unmasked(mask).equal(mask.any(-1))
        junk = torch.where(mask, x, float("nan"))
        assert rows.masked_sums(junk, mask).equal(torch.where(mask, x, 0).sum(-1))
        assert rows.masked(junk, mask).equal(torch.where(mask, x, 0))
