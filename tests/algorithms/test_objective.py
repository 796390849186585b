"""The loss and its gradient do not depend on how the mini-batch was cut, padded or ordered."""

from __future__ import annotations

import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megarl.algorithms import Objective, aggregate, denominators
from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.objective import ObjectiveResult

SEEDS = range(6)
NAMES = ("old_log_probs", "advantages", "ref_log_probs")


def random_data(seed: int, rows: int = 23, columns: int = 9) -> dict[str, Tensor]:
    """float32, lengths of 0 to `columns`, holes within, junk where masked."""
    generator = torch.Generator().manual_seed(seed)
    data = {name: torch.randn(rows, columns, generator=generator) for name in (*NAMES, "log_probs", "entropy")}
    data["log_probs"] = data["old_log_probs"] + 0.3 * data["log_probs"]
    lengths = torch.randint(0, columns + 1, (rows,), generator=generator)
    mask = (torch.arange(columns) < lengths[:, None]) & (torch.rand(rows, columns, generator=generator) < 0.8)
    junk = torch.where(torch.rand(rows, columns, generator=generator) < 0.5, math.nan, math.inf)
    data = {name: torch.where(mask, values, junk) for name, values in data.items()}
    data["loss_mask"] = mask.float()
    return data


def evaluate(
    objective: Objective, data: dict[str, Tensor], pieces: list[Tensor], pad: int = 0
) -> tuple[ObjectiveResult, Tensor]:
    """Loss, sums, maxima and the gradient of log-probs and entropy over `pieces` (row indices) of the mini-batch."""
    log_probs = data["log_probs"].clone().requires_grad_()
    entropy = data["entropy"].clone().requires_grad_()
    whole = denominators(data["loss_mask"])
    loss, sums, maxima = torch.zeros(()), dict[str, Tensor](), dict[str, Tensor]()
    for rows in pieces:
        part = {name: torch.nn.functional.pad(data[name][rows], (0, pad)) for name in (*NAMES, "loss_mask")}
        padded = [torch.nn.functional.pad(x[rows], (0, pad), value=math.nan) for x in (log_probs, entropy)]
        result = objective(padded[0], padded[1], part, whole)
        result.loss.backward()  # one backward a piece, as micro-batches and ranks do
        loss = loss + result.loss.detach()
        sums = {name: sums.get(name, torch.zeros(())) + value for name, value in result.sums.items()}
        maxima = {name: torch.maximum(maxima.get(name, torch.zeros(())), v) for name, v in result.maxima.items()}
    assert log_probs.grad is not None and entropy.grad is not None
    return ObjectiveResult(loss, sums, maxima), torch.stack([log_probs.grad, entropy.grad])


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_any_cut_gives_the_same_loss_and_gradient(seed: int, mode: str) -> None:
    objective = Objective(aggregation=mode, entropy_coefficient=0.01, kl_coefficient=0.1)
    data = random_data(seed)
    rows = torch.arange(len(data["loss_mask"]))
    whole, gradient = evaluate(objective, data, [rows])
    assert whole.loss.isfinite() and gradient.isfinite().all() and gradient.any()
    counted = denominators(data["loss_mask"])
    noise = 1e-6 * max(1.0, counted.tokens / counted.of(mode))  # rounding grows with the number of terms in the sum
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(rows), generator=generator)
    cuts = torch.randint(0, len(rows) + 1, (4,), generator=generator).sort().values.tolist()
    pieces = list(torch.tensor_split(order, cuts))  # unequal, shuffled, and now and then empty
    for cut, pad in ((pieces, 0), (list(rows.split(1)), 0), ([rows], 4), (pieces, 3)):
        result, other = evaluate(objective, data, cut, pad)
        torch.testing.assert_close(result.loss, whole.loss, rtol=1e-6, atol=noise)
        torch.testing.assert_close(other, gradient, rtol=1e-6, atol=1e-7)
        for name, value in whole.sums.items():
            torch.testing.assert_close(result.sums[name], value, rtol=1e-6, atol=noise)
        assert result.maxima == whole.maxima


def test_a_plain_loop_over_the_mini_batch_in_float64() -> None:
    data = random_data(0)
    mask = data["loss_mask"].bool()
    tokens = data["log_probs"].double()
    rows = [[(i, j) for j in range(mask.shape[1]) if mask[i, j]] for i in range(len(mask))]
    rows = [row for row in rows if row]
    means = {
        "token_mean": math.fsum(float(tokens[c]) for r in rows for c in r) / sum(map(len, rows)),
        "token_sum": math.fsum(float(tokens[c]) for r in rows for c in r),
        "seq_mean_token_sum": math.fsum(float(tokens[c]) for r in rows for c in r) / len(rows),
        "seq_mean_token_mean": math.fsum(float(tokens[c]) / len(r) for r in rows for c in r) / len(rows),
        "seq_mean_token_sum_norm": math.fsum(float(tokens[c]) for r in rows for c in r) / len(rows) / 20,
    }
    divisors = denominators(mask, max_length=20)
    for mode, expected in means.items():
        assert (aggregate(tokens, mask, mode) / divisors.of(mode)).item() == pytest.approx(expected, rel=1e-12), mode


def test_denominators() -> None:
    mask = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]])
    counted = denominators(mask)
    assert (counted.tokens, counted.sequences, counted.max_length) == (3.0, 2.0, 3.0)
    assert denominators(mask, max_length=16).of("seq_mean_token_sum_norm") == 32.0
    assert denominators(torch.nn.functional.pad(mask, (0, 9))) == counted
    nothing = denominators(torch.zeros(0, 4))
    assert all(nothing.of(mode) == 1.0 for mode in AGGREGATIONS)
    for function in (counted.of, lambda mode: aggregate(mask, mask, mode)):
        with pytest.raises(ValueError, match="no aggregation 'mean'; there are token_mean"):
            function("mean")


def test_the_terms_add_up() -> None:
    data = random_data(1)
    whole = denominators(data["loss_mask"])
    objective = Objective(entropy_coefficient=0.5, kl_coefficient=0.25)
    result = objective(data["log_probs"], data["entropy"], data, whole)
    sums = {name: value.item() for name, value in result.sums.items()}
    assert result.loss.item() == pytest.approx(
        sums["pg_loss"] - 0.5 * sums["entropy"] + 0.25 * sums["kl_loss"], rel=1e-5
    )
    assert {"pg_loss", "kl_loss", "entropy", "clip_fraction", "ppo_kl"} <= sums.keys()
    assert set(result.maxima) == {"ratio_max", "abs_log_ratio_max"}
    drift = (data["log_probs"] - data["old_log_probs"])[data["loss_mask"].bool()]
    assert result.maxima["abs_log_ratio_max"].item() == pytest.approx(drift.abs().max().item(), rel=1e-6)
    assert result.maxima["ratio_max"].item() == pytest.approx(drift.exp().max().item(), rel=1e-6)
    assert sums["ppo_kl"] == pytest.approx(-drift.mean().item(), rel=1e-5)


def test_the_reference_is_watched_without_being_in_the_loss() -> None:
    data = random_data(2)
    whole = denominators(data["loss_mask"])
    watched = Objective()(data["log_probs"], None, data, whole)
    blind = Objective()(data["log_probs"], None, {k: v for k, v in data.items() if k != "ref_log_probs"}, whole)
    assert watched.loss == blind.loss and watched.sums["kl"] > 0 and "kl" not in blind.sums


def test_on_policy_is_exact() -> None:
    data = random_data(3)
    data["old_log_probs"] = data["ref_log_probs"] = data["log_probs"]
    result = Objective(kl_coefficient=0.1)(data["log_probs"], None, data, denominators(data["loss_mask"]))
    assert result.maxima["ratio_max"].item() == 1.0 and result.maxima["abs_log_ratio_max"].item() == 0.0
    assert result.sums["ppo_kl"] == 0 and result.sums["kl"] == 0 and result.sums["clip_fraction"] == 0


def test_from_config_reads_its_own_fields_and_travels() -> None:
    section = SimpleNamespace(**vars(Objective(clip_high=0.28, aggregation="seq_mean_token_mean")), advantage="grpo")
    objective = Objective.from_config(section)
    assert objective == Objective(clip_high=0.28, aggregation="seq_mean_token_mean")
    assert pickle.loads(pickle.dumps(objective)) == objective


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policy_loss": "nope"}, "no policy loss 'nope'"),
        ({"aggregation": "mean"}, "no aggregation 'mean'"),
        ({"kl_estimator": "k9"}, "no KL estimator 'k9'"),
        ({"clip_low": 1.5}, "clip_low is 1.5"),
        ({"clip_high": -0.1}, "clip_high is -0.1"),
        ({"clip_dual": 1.0}, "clip_dual is 1.0"),
    ],
)
def test_impossible_values_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Objective(**values)  # type: ignore[arg-type]


def test_missing_or_misshapen_data_is_named() -> None:
    x = torch.zeros(2, 3)
    data = {"old_log_probs": x, "advantages": x, "loss_mask": x}
    with pytest.raises(ValueError, match="needs 'advantages'; it was given old_log_probs, loss_mask"):
        Objective()(x, None, {k: v for k, v in data.items() if k != "advantages"}, denominators(x))
    with pytest.raises(ValueError, match=r"advantages is \(3,\); as the model.s output it must be \(2, 3\)"):
        Objective()(x, None, {**data, "advantages": torch.zeros(3)}, denominators(x))
    with pytest.raises(ValueError, match="needs 'ref_log_probs'"):
        Objective(kl_coefficient=0.1)(x, None, data, denominators(x))
    with pytest.raises(ValueError, match="was given no entropy"):
        Objective(entropy_coefficient=0.1)(x, None, data, denominators(x))
