"""For every policy loss: any cut of a mini-batch by whole sequences, any order, any padding, any junk, the same result."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms import Objective, denominators
from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.policy_losses import policy_loss
from megarl.algorithms.value_loss import ValueObjective

Data = dict[str, Tensor]
COVARIANCE = {"cov_ratio": 0.2, "cov_low": 0.05, "cov_high": 50.0}


def random_data(seed: int, rows: int, columns: int, density: float) -> Data:
    """float64; lengths of 0 to `columns`, holes within; some log-ratios far off, some beyond the limit."""
    g = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, columns, generator=g, dtype=torch.float64)

    lengths = torch.randint(0, columns + 1, (rows,), generator=g)
    mask = (torch.arange(columns) < lengths[:, None]) & (torch.rand(rows, columns, generator=g) < density)
    old = -normal().abs() - 0.1
    data = {"old_log_probs": old, "advantages": normal(), "loss_mask": mask.double(), "values": normal()}
    data |= {"ref_log_probs": old + normal(), "rollout_log_probs": old + 0.2 * normal(), "returns": normal()}
    wild = torch.where(torch.rand(rows, columns, generator=g) < 0.1, 15.0, 0.3)
    return data | {"log_probs": old + wild * normal(), "entropy": normal(), "correction_weights": normal().abs()}


def moved(data: Data, order: Tensor, pad: int, junk: float) -> Data:
    """The same mini-batch: other order, more padding, and junk wherever it is masked."""
    masked = data["loss_mask"] == 0
    filled = {k: v if k == "loss_mask" else torch.where(masked, junk, v) for k, v in data.items()}
    pads = {k: torch.nn.functional.pad(v, (0, pad), value=0.0 if k == "loss_mask" else junk) for k, v in filled.items()}
    return {k: v[order] for k, v in pads.items()}


def run(objective: Any, data: Data, pieces: list[Tensor]) -> tuple[Data, Tensor]:
    """({loss, sums, maxima}, gradient of log-probs and entropy) over pieces of the mini-batch; prepared on the whole."""
    actor = isinstance(objective, Objective)
    leaves = [data[name].clone().requires_grad_() for name in ("log_probs", "entropy")]
    known = data | (objective.prepare(data) if actor else {})
    whole = denominators(data["loss_mask"])
    total: Data = {}
    for rows in pieces:
        part = {k: v[rows] for k, v in known.items()}
        inputs = [x[rows] for x in leaves]
        result = objective(*inputs, part, whole) if actor else objective(inputs[0], part, whole)
        result.loss.backward()
        for name, value in {"loss": result.loss.detach(), **result.sums}.items():
            total[name] = total.get(name, torch.zeros(())) + value
        for name, value in result.maxima.items():
            total[name] = torch.maximum(total.get(name, torch.zeros(())), value)
    return total, torch.stack([x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves])


def check(objective: Any, seed: int, rows: int, columns: int, pad: int, density: float, cuts: list[int]) -> None:
    data = random_data(seed, rows, columns, density)
    everything = torch.arange(rows)
    expected, gradient = run(objective, data, [everything])
    g = torch.Generator().manual_seed(seed + 1)
    order = torch.randperm(rows, generator=g)
    for junk in (math.nan, math.inf, 0.0):
        other = moved(data, order, pad, junk)
        pieces = list(torch.tensor_split(everything, sorted(min(c, rows) for c in cuts)))  # some of them empty
        result, moved_gradient = run(objective, other, pieces)
        back = torch.zeros_like(gradient)
        back[:, order] = moved_gradient[..., :columns]
        torch.testing.assert_close(back, gradient, rtol=1e-9, atol=1e-11)
        assert not moved_gradient[..., columns:].any()
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            rounding = 1e-6 if name.endswith("fraction") else 1e-9  # counts are divided in float32
            torch.testing.assert_close(result[name].double(), value.double(), rtol=rounding, atol=1e-11, msg=name)


shapes = {
    "seed": st.integers(0, 10_000),
    "rows": st.integers(1, 7),
    "columns": st.integers(1, 6),
    "pad": st.integers(0, 3),
    "density": st.sampled_from([0.3, 0.8, 1.0]),
    "cuts": st.lists(st.integers(0, 7), max_size=4),
}


@pytest.mark.parametrize("name", policy_loss.names)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(**shapes, mode=st.sampled_from([None, *AGGREGATIONS]))
def test_policy_losses(name: str, mode: str | None, **shape: Any) -> None:
    known = {k: v for k, v in COVARIANCE.items() if k in policy_loss.options(name)}
    objective = Objective(name, known, aggregation=mode, entropy_coefficient=0.1, kl_coefficient=0.2)
    check(objective, **shape)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(**shapes, mode=st.sampled_from(AGGREGATIONS), clip=st.sampled_from([None, 0.2]))
def test_value_loss(mode: str, clip: float | None, **shape: Any) -> None:
    check(ValueObjective(clip, mode), **shape)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(**shapes)
def test_what_is_selected_depends_on_the_tokens_alone(
    name: str, seed: int, rows: int, columns: int, pad: int, density: float, cuts: list[int]
) -> None:
    known = {k: v for k, v in COVARIANCE.items() if k in policy_loss.options(name)}
    objective = Objective(name, known)
    data = {k: v.float() for k, v in random_data(seed, rows, columns, density).items()}
    selected = objective.prepare(data)["selected"]
    assert not selected[data["loss_mask"] == 0].any()
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    other = objective.prepare(moved(data, order, pad, math.nan))["selected"]
    assert torch.equal(other[:, :columns], selected[order]) and not other[:, columns:].any()
