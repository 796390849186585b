"""Advantages against reference values computed with another library (their origin is in the file)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.advantages import gae, get_advantage, grpo, grpo_passk, reinforce_plus_plus
from megarl.algorithms.whitening import masked_whiten

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden.json").read_text())


def golden(name: str) -> Tensor:
    return torch.tensor(GOLDEN[name])


REWARD, MASK, INDEX = golden("token_level_rewards"), golden("response_mask"), GOLDEN["index"]


def same(ours: Tensor, theirs: Any, mask: Tensor = MASK) -> None:
    """Where masked, theirs holds what happened to be there, ours 0."""
    torch.testing.assert_close(ours, torch.tensor(theirs) * mask, rtol=0, atol=1e-5)


def test_gae() -> None:
    result, expected = gae(REWARD, MASK, golden("values"), gamma=0.99, lam=0.95), GOLDEN["gae(gamma=.99,lam=.95)"]
    same(result.advantages_BT, expected["adv"])
    same(result.returns_BT, expected["ret"])


@pytest.mark.parametrize("name", ["grpo", "opo", "gpg"])
def test_group_relative(name: str) -> None:
    result = get_advantage(name)(REWARD, MASK, INDEX, singleton="score")
    same(result.advantages_BT, GOLDEN[name])
    same(result.returns_BT, GOLDEN[name])


def test_dr_grpo_is_grpo_times_its_standard_deviation() -> None:
    result = grpo(REWARD, MASK, INDEX, normalize_std=False, singleton="score")
    same(result.advantages_BT, [[0.5], [-0.5], [0.75], [-0.75], [3.0]])


def test_pass_at_k() -> None:
    result = grpo_passk(REWARD[:4], MASK[:4], INDEX[:4])
    same(result.advantages_BT, GOLDEN["grpo_passk(rows 0-3)"], MASK[:4])


def test_reinforce_plus_plus() -> None:
    result, expected = reinforce_plus_plus(REWARD, MASK, gamma=0.9), GOLDEN["reinforce_plus_plus(gamma=.9)"]
    same(result.advantages_BT, expected["adv"])
    same(result.returns_BT, expected["ret"])


def test_whitening() -> None:
    x, mask = (torch.tensor(GOLDEN["masked_whiten_input"][name], dtype=torch.float32) for name in ("x", "mask"))
    same(masked_whiten(x, mask), GOLDEN["masked_whiten"], mask)
    same(masked_whiten(x, mask, shift_mean=False), GOLDEN["masked_whiten_noshift"], mask)
