"""The critic's loss: the worse of the two errors, its gradient, and an objective called as the actor's is."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megarl.algorithms import denominators
from megarl.algorithms.value_loss import ValueObjective, value_loss


def random_case(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, 6, 5, generator=g, dtype=torch.float64)
    return values, old, returns, torch.rand(6, 5, generator=g) < 0.7


@pytest.mark.parametrize("seed", range(5))
def test_the_worse_of_the_two(seed: int) -> None:
    values, old, returns, mask = random_case(seed)
    result = value_loss(values, old, returns, mask, clip=0.3)
    free, held = (values - returns) ** 2, (torch.clamp(values, old - 0.3, old + 0.3) - returns) ** 2
    torch.testing.assert_close(result.loss_BT[mask], (torch.maximum(free, held) / 2)[mask])
    assert torch.equal(result.clipped_BT[mask], (held > free)[mask])
    assert not result.loss_BT[~mask].any() and not result.clipped_BT[~mask].any()
    unclipped = value_loss(values, old, returns, mask, clip=None)
    torch.testing.assert_close(unclipped.loss_BT[mask], (free / 2)[mask])
    assert not unclipped.clipped_BT.any()


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_gradients_equal_finite_differences(seed: int, clip: float | None) -> None:
    values, old, returns, mask = random_case(seed)
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, mask, clip=clip).loss_BT, (values,))


def test_a_value_inside_the_clip_has_the_whole_gradient_and_a_clipped_one_none() -> None:
    values = torch.tensor([[0.1, 5.0, -5.0]], requires_grad=True)
    old, returns = torch.zeros(1, 3), torch.tensor([[1.0, 9.0, 9.0]])
    value_loss(values, old, returns, torch.ones(1, 3), clip=0.2).loss_BT.sum().backward()
    # 5 ran towards its return of 9: the clip holds it. -5 ran away from it: the whole error counts.
    torch.testing.assert_close(values.grad, torch.tensor([[-0.9, 0.0, -14.0]]))


def test_objective_metrics_and_travels() -> None:
    values, old, returns, mask = random_case(1)
    data = {"values": old, "returns": returns, "loss_mask": mask}
    objective = ValueObjective.from_config(SimpleNamespace(value_clip=None, lr=1.0))
    assert objective == ValueObjective(None) and pickle.loads(pickle.dumps(objective)) == objective
    result = objective(values, data, denominators(mask))
    error = (values - returns)[mask]
    assert result.loss.item() == pytest.approx(error.square().mean().item() / 2)
    assert result.sums["value_error_square"].item() == pytest.approx(error.square().mean().item())
    assert result.sums["value_mean"].item() == pytest.approx(values[mask].mean().item())
    assert result.maxima["value_error_max"].item() == pytest.approx(error.abs().max().item())
    assert set(objective.needs) == set(data)


def test_what_is_wrong_is_named() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="needs 'returns'; it was given values, loss_mask"):
        ValueObjective()(x, {"values": x, "loss_mask": x}, denominators(x))
    with pytest.raises(ValueError, match=r"returns is \(3,\)"):
        ValueObjective()(x, {"values": x, "returns": x[0], "loss_mask": x}, denominators(x))
    with pytest.raises(ValueError, match="value_clip is 0"):
        ValueObjective(value_clip=0)
    with pytest.raises(ValueError, match="no aggregation 'mean'"):
        ValueObjective(value_aggregation="mean")
