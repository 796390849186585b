"""The loss and its gradient do not depend on how the mini-batch was cut, padded or ordered."""

from __future__ import annotations

import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megarl.algorithms import Objective, PolicyLoss, aggregate, denominators
from megarl.algorithms.aggregation import AGGREGATIONS
from megarl.algorithms.objective import ObjectiveResult
from megarl.algorithms.policy_losses import policy_loss

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


def test_from_config_keeps_the_default_of_what_the_section_lacks() -> None:
    assert Objective.from_config(SimpleNamespace(clip_high=0.3)) == Objective(clip_high=0.3)
    section = SimpleNamespace(policy_loss="dro", policy_loss_options={"beta": 0.2}, aggregation=None)
    objective = Objective.from_config(section)
    assert objective.policy_loss_options == {"beta": 0.2} and objective.mode == "token_mean"
    assert pickle.loads(pickle.dumps(objective)) == objective


def test_options_are_checked_and_reach_the_loss_and_its_preparation() -> None:
    with pytest.raises(ValueError, match="no option 'cov_ration'; did you mean 'cov_ratio'"):
        Objective("clip_cov", {"cov_ration": 0.1})
    with pytest.raises(ValueError, match="selected_BT"):
        Objective("kl_cov", {"selected_BT": 1})
    data = {k: v for k, v in random_data(4).items() if k != "entropy"}
    mask = data["loss_mask"].bool()
    few, many = (Objective("kl_cov", {"cov_ratio": ratio}).prepare(data)["selected"] for ratio in (1e-9, 0.25))
    assert few.sum() == 1 and many.sum() == int(0.25 * mask.sum()) and (many | ~few).all()
    losses = []
    for weight in (0.0, 5.0):
        objective = Objective("kl_cov", {"cov_ratio": 0.25, "kl_weight": weight})
        losses.append(objective(data["log_probs"], None, data | objective.prepare(data), denominators(mask)).loss)
    drift = (data["log_probs"] - data["old_log_probs"]).abs()[many].sum() / mask.sum()
    assert (losses[1] - losses[0]).item() == pytest.approx(5 * drift.item(), rel=1e-5)


def test_kl_cov_selects_the_largest_covariances_and_clip_cov_within_bounds() -> None:
    data = random_data(8, rows=50)
    mask = data["loss_mask"].bool()
    x, a = (data[name][mask].double() for name in ("old_log_probs", "advantages"))
    covariance = torch.zeros(mask.shape, dtype=torch.float64)
    covariance[mask] = (x - x.mean()) * (a - a.mean())
    count = int(0.05 * mask.sum())
    selected = Objective("kl_cov", {"cov_ratio": 0.05}).prepare(data)["selected"]
    least = covariance[mask].sort(descending=True).values[count - 1]
    assert torch.equal(selected, mask & (covariance >= least))
    drawn = Objective("clip_cov", {"cov_ratio": 0.05, "cov_low": 0.2, "cov_high": 2.0}).prepare(data)["selected"]
    candidates = mask & (covariance > 0.2) & (covariance < 2.0)
    assert drawn.sum() == count and (candidates | ~drawn).all() and candidates.sum() > 2 * count
    # As good as random: not the largest ones, nor the first.
    assert covariance[drawn].mean() < covariance[candidates].sort().values[-count:].mean()
    assert drawn[: len(mask) // 2].any() and drawn[len(mask) // 2 :].any()


def test_tokens_that_are_certain_are_told_apart_by_their_sequences() -> None:
    """Many tokens of log-prob exactly 0 share the largest covariance; still not all of them, nor none, are selected."""
    old = -torch.rand(40, 12, generator=torch.Generator().manual_seed(0))
    old[:, ::2] = 0.0
    data = {"old_log_probs": old, "advantages": torch.ones(40, 1).expand(40, 12), "loss_mask": torch.ones(40, 12)}
    data["advantages"] = torch.where(torch.arange(40)[:, None] < 20, data["advantages"], -1.0)
    selected = Objective("kl_cov", {"cov_ratio": 0.1}).prepare(data)["selected"]
    assert selected.sum() == 48 and len(selected.nonzero()[:, 1].unique()) == 6


@pytest.mark.parametrize("name", ["kl_cov", "clip_cov"])
def test_tokens_of_equal_values_are_told_apart_by_place_and_by_sequence(name: str) -> None:
    """20 sequences hold 6 tokens each that are equal and have the largest covariance: 50 of them are neither whole sequences
    nor whole places."""
    old = torch.zeros(40, 7)
    old[:, 0] = -torch.rand(40, generator=torch.Generator().manual_seed(0)) - 1  # what tells the sequences apart
    advantages = torch.where(torch.arange(40)[:, None] < 20, 1.0, -1.0) * (old == 0)
    data = {"old_log_probs": old, "advantages": advantages, "loss_mask": torch.ones(40, 7)}
    bounds = {"cov_low": 0.0, "cov_high": 50.0} if name == "clip_cov" else {}
    selected = Objective(name, {"cov_ratio": 50.5 / 280, **bounds}).prepare(data)["selected"]
    assert selected.sum() == 50 == selected[:20, 1:].sum()
    assert len(selected.sum(1).unique()) > 2, "not by whole sequences"


@pytest.mark.parametrize("name", ["kl_cov", "clip_cov"])
def test_padding_on_either_side_and_between_does_not_change_what_is_selected(name: str) -> None:
    """A place is counted in unmasked tokens."""
    old = -torch.randint(0, 2, (30, 6), generator=torch.Generator().manual_seed(1)).float()
    data = {"old_log_probs": old, "advantages": torch.where(torch.arange(30)[:, None] < 15, 1.0, -1.0).expand(30, 6)}
    data["loss_mask"] = torch.ones(30, 6)
    bounds = {"cov_low": 0.0, "cov_high": 50.0} if name == "clip_cov" else {}
    objective = Objective(name, {"cov_ratio": 0.1, **bounds})
    selected = objective.prepare(data)["selected"]
    assert 18 <= selected.sum() <= 30
    for columns in ([3, 4, 5, 6, 7, 8], [0, 1, 2, 5, 6, 9], [0, 1, 2, 3, 4, 5]):
        wide = {key: torch.full((30, 10), 0.0 if key == "loss_mask" else math.nan) for key in data}
        for key, values in data.items():
            wide[key][:, columns] = values
        assert torch.equal(objective.prepare(wide)["selected"][:, columns], selected)


def test_advantages_in_the_thousands_are_told_apart() -> None:
    """What is not finite counts as a million, so that the means stay finite; what is finite counts as it is."""
    old = torch.tensor([[-0.2, -0.1, -3.0, -3.0]])
    data = {"old_log_probs": old, "advantages": torch.tensor([[5e3, 2e3, 0.0, 0.0]]), "loss_mask": torch.ones(1, 4)}
    assert Objective("kl_cov").prepare(data)["selected"].tolist() == [[True, False, False, False]]


def test_what_cannot_be_told_apart_is_selected_together() -> None:
    data = {name: torch.ones(16, 1) for name in ("old_log_probs", "advantages", "loss_mask")}
    assert Objective("kl_cov").prepare(data)["selected"].all()


def test_what_was_not_prepared_is_missed_by_name() -> None:
    data = random_data(5)
    objective = Objective("clip_cov")
    assert objective.prepares and "selected" in objective.needs and not Objective().prepares
    assert Objective().prepare(data) == {}
    with pytest.raises(ValueError, match="needs 'selected'"):
        objective(data["log_probs"], None, data, denominators(data["loss_mask"]))
    with pytest.raises(ValueError, match="needs 'rollout_log_probs'"):
        Objective("decoupled")(data["log_probs"], None, data, denominators(data["loss_mask"]))
    assert "rollout_log_probs" in Objective("decoupled").needs and "rollout_log_probs" not in Objective().needs
    assert "ref_log_probs" in Objective(kl_coefficient=0.1).needs
    assert "ref_hidden" in Objective(kl_coefficient=0.1, kl_estimator="full").needs
    assert Objective(kl_coefficient=0.1, kl_estimator="top_k").exact_kl == "top_k"
    assert Objective(kl_estimator="top_k").exact_kl is None is Objective(kl_coefficient=0.1).exact_kl
    assert {"correction_weights", "ref_log_probs", "rollout_log_probs"} <= set(Objective().reads)


def test_correction_weights_multiply_the_policy_loss_alone() -> None:
    data = random_data(6)
    whole = denominators(data["loss_mask"])
    objective = Objective(entropy_coefficient=0.5, kl_coefficient=0.25)
    plain = objective(data["log_probs"], data["entropy"], data, whole)
    weights = torch.full_like(data["loss_mask"], 3.0).requires_grad_()
    log_probs = data["log_probs"].clone().requires_grad_()
    heavy = objective(log_probs, data["entropy"], data | {"correction_weights": weights}, whole)
    assert heavy.sums["pg_loss"].item() == pytest.approx(3 * plain.sums["pg_loss"].item(), rel=1e-6)
    for name in ("kl_loss", "entropy", "clip_fraction", "ppo_kl"):
        assert heavy.sums[name] == plain.sums[name], name
    heavy.loss.backward()
    assert weights.grad is None


def test_a_loss_of_ones_own_prepares_and_is_given_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered with a preparation of its own; masked places hold nothing by the time it sees them."""

    def rank(advantages_BT: Tensor, mask_BT: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        return {"rank_BT": torch.where(mask_BT, advantages_BT / advantages_BT.abs().max() * scale, 0.0)}

    def loss(log_probs_BT: Tensor, rank_BT: Tensor, entropy_BT: Tensor, *, scale: float = 1.0) -> PolicyLoss:
        return PolicyLoss(-log_probs_BT * rank_BT * (1 + entropy_BT), torch.ones_like(rank_BT))

    for attribute in ("_functions", "_traits"):
        monkeypatch.setattr(policy_loss, attribute, dict(getattr(policy_loss, attribute)))
    monkeypatch.setattr(policy_loss, "inputs", policy_loss.inputs)
    policy_loss("ranked", aggregation="token_sum", prepare=rank, makes=("rank_BT",))(loss)
    objective = Objective("ranked", {"scale": 2.0})
    data = random_data(9)
    assert objective.mode == "token_sum"
    log_probs = data["log_probs"].clone().requires_grad_()
    result = objective(log_probs, data["entropy"], data | objective.prepare(data), denominators(data["loss_mask"]))
    result.loss.backward()
    mask = data["loss_mask"].bool()
    a = data["advantages"][mask]
    expected = -a / a.abs().max() * 2 * (1 + data["entropy"][mask])
    torch.testing.assert_close(log_probs.grad[mask], expected)
    assert not log_probs.grad[~mask].any()
    with pytest.raises(ValueError, match="`prepare` and the names that it `makes` belong together"):
        policy_loss("half", makes=("x_BT",))(loss)


def test_an_undefined_ratio_is_never_hidden() -> None:
    """-inf less -inf at an unmasked token is NaN in the loss, in the ratio's maximum and in the gradient of that token alone:
    who takes the step sees it."""
    log_probs = torch.tensor([[-math.inf, -1.0]], requires_grad=True)
    data = {
        "old_log_probs": torch.tensor([[-math.inf, -1.0]]),
        "advantages": torch.ones(1, 2),
        "loss_mask": torch.ones(1, 2),
    }
    result = Objective()(log_probs, None, data, denominators(torch.ones(1, 2)))
    result.loss.backward()
    assert result.loss.isnan() and result.sums["pg_loss"].isnan() and result.sums["ppo_kl"].isnan()
    assert result.maxima["abs_log_ratio_max"].isnan() and result.maxima["ratio_max"].isnan()
    assert log_probs.grad is not None and log_probs.grad[0, 1] == -0.5
