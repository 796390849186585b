"""GRPO against a plain loop, and what must not change it: order, padding, junk, the groups' names."""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.algorithms import call, get_advantage
from megarl.algorithms.advantages import grpo

SEEDS = range(12)


def random_case(seed: int) -> tuple[Tensor, Tensor, list[Hashable]]:
    """Rewards on several tokens, holes in the masks, unequal interleaved groups, some of one, some of equal rewards."""
    generator = np.random.default_rng(seed)
    rows, columns = int(generator.integers(1, 40)), int(generator.integers(1, 9))
    reward = torch.from_numpy(generator.normal(size=(rows, columns)).astype(np.float32))
    mask = torch.from_numpy((generator.random((rows, columns)) < 0.7).astype(np.float32))
    names: list[Hashable] = ["a", 7, ("x", 1), "7", 3.5, None, True, frozenset({1})]
    group = [names[i] for i in generator.integers(0, len(names), rows)]
    return reward, mask, group


def loop_grpo(reward: Tensor, mask: Tensor, group: list[Hashable], normalize: bool, singleton: str) -> Tensor:
    """The definition, one group after another, in float64."""
    result = torch.zeros(reward.shape, dtype=torch.float64)
    for name in set(group):
        rows = [i for i in range(len(group)) if group[i] == name and mask[i].sum() > 0]
        scores = [math.fsum(float(r) for r, m in zip(reward[i], mask[i], strict=True) if m) for i in rows]
        for i, score in zip(rows, scores, strict=True):
            if len(rows) == 1:
                value = score if singleton == "score" else 0.0
            else:
                mean = math.fsum(scores) / len(rows)
                variance = math.fsum((s - mean) ** 2 for s in scores) / (len(rows) - 1)
                value = (score - mean) / (math.sqrt(variance) + 1e-6) if normalize else score - mean
            result[i] = value * mask[i].double()
    return result


@pytest.mark.parametrize("singleton", ["zero", "score"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_equals_a_plain_loop(seed: int, normalize: bool, singleton: str) -> None:
    reward, mask, group = random_case(seed)
    result = grpo(reward, mask, group, normalize_std=normalize, singleton=singleton)
    assert result.advantages_BT.dtype == torch.float32
    expected = loop_grpo(reward, mask, group, normalize, singleton)
    torch.testing.assert_close(result.advantages_BT.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_order_padding_junk_and_names_do_not_matter(seed: int) -> None:
    reward, mask, group = random_case(seed)
    before = reward.clone(), mask.clone(), list(group)
    plain = grpo(reward, mask, group).advantages_BT
    order = torch.randperm(len(group), generator=torch.Generator().manual_seed(seed))
    shuffled = grpo(reward[order], mask[order], [group[i] for i in order]).advantages_BT
    torch.testing.assert_close(shuffled, plain[order], rtol=1e-5, atol=1e-6)
    wide = torch.nn.functional.pad
    padded = grpo(wide(reward, (0, 5), value=math.nan), wide(mask, (0, 5)), group).advantages_BT
    torch.testing.assert_close(padded[:, : reward.shape[1]], plain, rtol=1e-5, atol=1e-6)
    assert not padded[:, reward.shape[1] :].any()
    for junk in (math.nan, math.inf, -math.inf, 1e30):
        assert torch.equal(grpo(torch.where(mask > 0, reward, junk), mask, group).advantages_BT, plain)
    numbers = {name: i for i, name in enumerate(dict.fromkeys(group))}
    as_tensor = torch.tensor([numbers[name] for name in group])
    assert torch.equal(grpo(reward, mask.bool(), as_tensor).advantages_BT, plain)
    assert torch.equal(grpo(reward, mask, as_tensor.numpy()).advantages_BT, plain)
    assert torch.equal(reward, before[0]) and torch.equal(mask, before[1]) and group == before[2]


@pytest.mark.parametrize("value", [0.1, -1 / 3, 1e-30, 12345.678])
@pytest.mark.parametrize("size", [2, 3, 7, 64])
def test_equal_rewards_are_exactly_zero(value: float, size: int) -> None:
    """A mean of 0.1, 0.1, 0.1 is not 0.1 in floating point; the noise divided by eps would be an advantage of 0.1."""
    reward = torch.zeros(size, 4)
    reward[:, 2] = value
    for normalize in (True, False):
        assert not grpo(reward, torch.ones(size, 4), ["g"] * size, normalize_std=normalize).advantages_BT.any()


def test_a_masked_row_is_in_nobodys_statistics() -> None:
    reward = torch.tensor([[1.0], [0.0], [5.0]])
    mask = torch.tensor([[1.0], [1.0], [0.0]])
    result = grpo(reward, mask, ["g", "g", "g"]).advantages_BT
    assert torch.equal(result[:2], grpo(reward[:2], mask[:2], ["g", "g"]).advantages_BT)
    assert result[2].item() == 0.0


def test_half_precision_is_summed_in_float32() -> None:
    reward = torch.full((2, 512), 1.0, dtype=torch.bfloat16)  # bfloat16 cannot count beyond 256
    reward[1] = 0.5
    result = grpo(reward, torch.ones(2, 512), ["g", "g"], normalize_std=False).advantages_BT
    assert result[0, 0].item() == 128.0


def test_what_is_not_defined_is_said() -> None:
    reward, mask = torch.tensor([[1.0], [math.nan]]), torch.ones(2, 1)
    with pytest.raises(ValueError, match="group 'odd': the score of sample 1 is nan"):
        grpo(reward, mask, ["even", "odd"])
    with pytest.raises(ValueError, match="singleton is 'mean'"):
        grpo(mask, mask, ["g", "g"], singleton="mean")
    with pytest.raises(ValueError, match="names 3 samples, the rewards are for 2"):
        grpo(mask, mask, ["g", "g", "g"])
    with pytest.raises(ValueError, match=r"must be one \(B, T\)"):
        grpo(mask, torch.ones(2, 2), ["g", "g"])


def test_the_estimator_is_called_by_name_with_what_it_takes() -> None:
    mask = torch.ones(2, 1)
    offered = {"reward_BT": torch.tensor([[1.0], [3.0]]), "mask_BT": mask, "group_B": ["g", "g"], "values_BT": None}
    offered["normalize_std"] = False
    assert call(get_advantage("grpo"), offered).advantages_BT.tolist() == [[-1.0], [1.0]]
