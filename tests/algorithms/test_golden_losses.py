"""Policy losses and the value loss against reference values computed with another library (their origin is in the file)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms import Objective, denominators
from megarl.algorithms.value_loss import ValueObjective

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden.json").read_text())
LOSSES: dict[str, Any] = next(values for name, values in GOLDEN.items() if name.startswith("policy_losses("))
METRICS = {
    "clip_fraction": "actor/pg_clipfrac",
    "dual_clip_fraction": "actor/pg_clipfrac_lower",
    "ppo_kl": "actor/ppo_kl",
}


def golden(name: str) -> Tensor:
    return torch.tensor(GOLDEN[name])


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, modes in LOSSES.items() for mode in modes])
def test_loss_metrics_and_gradient(name: str, mode: str) -> None:
    expected, mask = LOSSES[name][mode], golden("response_mask")
    log_probs = (golden("old_log_prob") + golden("delta_moderate")).requires_grad_()
    data = {"old_log_probs": golden("old_log_prob"), "advantages": golden("advantages"), "loss_mask": mask}
    objective = Objective(name, aggregation=mode.replace("-", "_"), clip_low=0.2, clip_high=0.28, clip_dual=3.0)
    result = objective(log_probs, None, data, denominators(mask))
    result.loss.backward()
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, torch.tensor(expected["grad"]), rtol=0, atol=1e-5)
    assert result.loss.item() == pytest.approx(expected["loss"], abs=1e-5)
    for ours, theirs in METRICS.items():
        if theirs in expected["metrics"]:
            value = float(result.sums.get(ours, 0.0))  # a loss without a second clip reports none; theirs is 0
            assert value == pytest.approx(expected["metrics"][theirs], abs=1e-5), ours


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
def test_sequence_losses_are_averaged_over_sequences_by_themselves(name: str) -> None:
    assert Objective(name).mode == "seq_mean_token_mean"


def test_value_loss() -> None:
    case = GOLDEN["value_loss"]
    values = torch.tensor(case["values_predicted"], dtype=torch.float32)
    data = {"values": torch.tensor(case["values_old"]), "returns": torch.tensor(case["returns"])}
    data["loss_mask"] = torch.tensor(case["mask"])
    result = ValueObjective(value_clip=case["clip"])(values, data, denominators(data["loss_mask"]))
    loss, clip_fraction = case["loss_and_clipfrac"]
    assert result.loss.item() == pytest.approx(loss, abs=1e-5)
    assert result.sums["value_clip_fraction"].item() == pytest.approx(clip_fraction, abs=1e-5)
