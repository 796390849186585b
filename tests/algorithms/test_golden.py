"""Values and gradients against reference values computed with another library (their origin is in the file)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms import Objective, denominators, get_advantage

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden.json").read_text())
CLIPS = {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 3.0}


def golden(name: str) -> Tensor:
    return torch.tensor(GOLDEN[name])


def test_grpo() -> None:
    result = get_advantage("grpo")(
        golden("token_level_rewards"), golden("response_mask"), GOLDEN["index"], singleton="score"
    )
    torch.testing.assert_close(result.advantages_BT, golden("grpo"), rtol=0, atol=1e-5)
    torch.testing.assert_close(result.returns_BT, golden("grpo"), rtol=0, atol=1e-5)


def test_dr_grpo_is_grpo_times_its_standard_deviation() -> None:
    rewards, mask = golden("token_level_rewards"), golden("response_mask")
    result = get_advantage("grpo")(rewards, mask, GOLDEN["index"], normalize_std=False, singleton="score")
    expected = torch.tensor([0.5, -0.5, 0.75, -0.75, 3.0])[:, None] * mask
    torch.testing.assert_close(result.advantages_BT, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", sorted(GOLDEN["vanilla"]))
def test_vanilla_loss_metrics_and_gradient(mode: str) -> None:
    expected, mask = GOLDEN["vanilla"][mode], golden("response_mask")
    log_probs = (golden("old_log_prob") + golden("delta_moderate")).requires_grad_()
    data = {"old_log_probs": golden("old_log_prob"), "advantages": golden("advantages"), "loss_mask": mask}
    objective = Objective(aggregation=mode.replace("-", "_"), **CLIPS)
    result = objective(log_probs, None, data, denominators(mask))
    result.loss.backward()
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, torch.tensor(expected["grad"]), rtol=0, atol=1e-5)
    values = {
        "pg_loss": expected["loss"],
        "clip_fraction": expected["metrics"]["actor/pg_clipfrac"],
        "dual_clip_fraction": expected["metrics"]["actor/pg_clipfrac_lower"],
        "ppo_kl": expected["metrics"]["actor/ppo_kl"],
    }
    for name, value in values.items():
        assert float(result.sums[name]) == pytest.approx(value, abs=1e-5), name
    assert result.loss.item() == pytest.approx(expected["loss"], abs=1e-5)
