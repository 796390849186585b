"""Rollout correction against a plain loop in float64, what must not change it, and what it must achieve."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.rollout_correction import LEVELS, OUTSIDE, REJECTIONS, Correction, CorrectionSettings, correct

NAN, INF = math.nan, math.inf
many = settings(max_examples=60, deadline=None)


class Log(NamedTuple):
    """(B, T) each, float64."""

    old: Tensor
    rollout: Tensor
    mask: Tensor


def random_case(seed: int) -> Log:
    """Holes in the masks, rows all masked, and drifts of which some reach over any bound."""
    generator = np.random.default_rng(seed)
    shape = int(generator.integers(1, 9)), int(generator.integers(1, 7))
    rollout = torch.from_numpy(-generator.exponential(1.0, shape))
    old = rollout + torch.from_numpy(generator.normal(0.0, generator.choice([0.05, 0.5, 15.0]), shape))
    mask = torch.from_numpy(generator.random(shape) < generator.choice([0.6, 1.0]))
    mask[generator.random(shape[0]) < 0.2] = False
    return Log(old, rollout, mask)


@st.composite
def any_settings(draw: st.DrawFn) -> CorrectionSettings:
    bounds = {"ratio": [1.5, (0.6, 1.6), (0.3, None)], "k1": [0.3, (-0.4, 0.2), (None, 1.0)]}
    names = draw(st.lists(st.sampled_from(REJECTIONS), max_size=2, unique=True))
    return CorrectionSettings(
        level=draw(st.sampled_from(LEVELS)),
        outside=draw(st.sampled_from(OUTSIDE)),
        upper=draw(st.sampled_from([None, 1.3, 2.0])),
        lower=draw(st.sampled_from([None, 0.5, 0.9])),
        normalize=draw(st.booleans()),
        rejection={
            name: draw(st.sampled_from(bounds.get(name.split("_")[-1], [0.02, 0.5, (0.001, 2.0)]))) for name in names
        },
    )


def measure(name: str, d: float) -> float:
    return {"ratio": math.exp(d), "abs": abs(d), "k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[name]


def allowed(name: str, bound: Any, sequence: list[float]) -> list[bool]:
    """Which tokens of a sequence a rule lets pass, by its definition."""
    reach, _, kind = name.rpartition("_")
    lower, upper = bound if isinstance(bound, tuple) else (None, bound)
    low, high = -INF if lower is None else lower, INF if upper is None else upper
    if reach in ("token", "sequence_max"):
        inside = [low <= measure(kind, d) <= high for d in sequence]
        return inside if reach == "token" else [all(inside)] * len(sequence)
    values = sequence if kind == "ratio" else [measure(kind, d) for d in sequence]
    value = math.fsum(values) / (max(1, len(values)) if reach == "sequence_mean" else 1)
    return [low <= (math.exp(value) if kind == "ratio" else value) <= high] * len(sequence)


def loop_correct(log: Log, s: CorrectionSettings) -> tuple[Tensor, Tensor, dict[str, float]]:
    """One token after another."""
    weights, kept = torch.zeros(log.mask.shape, dtype=torch.float64), torch.zeros(log.mask.shape, dtype=torch.bool)
    outside, tokens, sequence_weights = torch.zeros_like(kept), 0, []
    for b in range(len(log.mask)):
        places = [t for t in range(log.mask.shape[1]) if log.mask[b, t]]
        d = [min(20.0, max(-20.0, float(log.old[b, t] - log.rollout[b, t]))) for t in places]
        total = math.fsum(d) / (len(d) if s.level == "geometric" and d else 1)
        passes = [allowed(name, bound, d) for name, bound in s.rejection.items()]
        tokens += len(d)
        for i, t in enumerate(places):
            of = {"none": 0.0, "token": d[i]}.get(s.level, min(20.0, max(-20.0, total)))
            weight, ok = math.exp(of), all(rule[i] for rule in passes)
            low, high = (0.0 if s.lower is None else s.lower), (INF if s.upper is None else s.upper)
            if s.level != "none" and not low <= weight <= high:
                outside[b, t] = True
                ok = ok and s.outside != "mask"
                weight = {"truncate": min(max(weight, low), high), "zero": 0.0, "mask": 0.0}[s.outside]
            weights[b, t], kept[b, t] = weight if ok else 0.0, ok
        if places:
            sequence_weights.append(float(weights[b].max()))
    by_sequence = s.level in ("sequence", "geometric")
    units = sequence_weights if by_sequence else weights.flatten().tolist()
    squares, n = math.fsum(w * w for w in units), len(sequence_weights) if by_sequence else tokens
    sequences = max(1, len(sequence_weights))
    chosen = weights[kept]
    metrics = {
        "effective_sample_size": math.fsum(units) ** 2 / (n * squares) if squares else 0.0,
        "outside_fraction": float(outside.sum()) / max(1, tokens),
        "outside_sequence_fraction": float(outside.any(1).sum()) / sequences,
        "rejected_fraction": float((log.mask & ~kept).sum()) / max(1, tokens),
        "rejected_sequence_fraction": float((log.mask.any(1) & ~kept.any(1)).sum()) / sequences,
        "weight_mean": float(chosen.mean()) if len(chosen) else 0.0,
        "weight_min": float(chosen.min()) if len(chosen) else 0.0,
        "weight_max": float(chosen.max()) if len(chosen) else 0.0,
    }
    scale = metrics["weight_mean"] if s.normalize and metrics["weight_mean"] > 0 else 1.0
    return weights / scale, kept, metrics | {"weight_scale": scale}


def assert_same(a: Correction, b: Correction) -> None:
    assert torch.equal(a.mask_BT, b.mask_BT)
    torch.testing.assert_close(a.weights_BT, b.weights_BT, rtol=1e-6, atol=1e-7)
    assert a.metrics == pytest.approx(b.metrics, rel=1e-6, abs=1e-9)


@many
@given(seed=st.integers(0, 10**6), chosen=any_settings())
def test_equals_a_plain_loop(seed: int, chosen: CorrectionSettings) -> None:
    log = random_case(seed)
    result = correct(*log, chosen)
    weights, kept, metrics = loop_correct(log, chosen)
    assert torch.equal(result.mask_BT, kept)
    assert result.weights_BT.dtype == torch.float32
    torch.testing.assert_close(result.weights_BT.double(), weights, rtol=1e-6, atol=1e-7)
    by_rule = {name: value for name, value in result.metrics.items() if name.startswith("rejected_by_")}
    assert set(by_rule) == {f"rejected_by_{name}_fraction" for name in chosen.rejection}
    rest = {name: value for name, value in result.metrics.items() if name not in by_rule}
    assert rest == pytest.approx(metrics, rel=1e-6, abs=1e-6)


@many
@given(seed=st.integers(0, 10**6), chosen=any_settings(), junk=st.sampled_from([NAN, INF, -INF, 3e38]))
def test_order_padding_and_junk_do_not_matter(seed: int, chosen: CorrectionSettings, junk: float) -> None:
    log = random_case(seed)
    plain = correct(*log, chosen)
    filled = log._replace(old=torch.where(log.mask, log.old, junk), rollout=torch.where(log.mask, log.rollout, -junk))
    dirty = correct(*filled, chosen)
    assert torch.equal(dirty.weights_BT, plain.weights_BT) and torch.equal(dirty.mask_BT, plain.mask_BT)
    assert dirty.metrics == plain.metrics

    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(log.mask)))
    back = order.argsort()
    shuffled = correct(*(x[order] for x in log), chosen)
    assert_same(shuffled._replace(weights_BT=shuffled.weights_BT[back], mask_BT=shuffled.mask_BT[back]), plain)

    def padded(values: Tensor, fill: float | bool) -> Tensor:
        return torch.nn.functional.pad(values, (2, 3), value=fill)

    wide = correct(padded(log.old, junk), padded(log.rollout, junk), padded(log.mask, False), chosen)
    assert not wide.mask_BT[:, :2].any() and not wide.mask_BT[:, -3:].any()
    assert_same(wide._replace(weights_BT=wide.weights_BT[:, 2:-3], mask_BT=wide.mask_BT[:, 2:-3]), plain)


@many
@given(seed=st.integers(0, 10**6), chosen=any_settings())
def test_a_batch_may_be_cut_where_weights_are_not_normalised(seed: int, chosen: CorrectionSettings) -> None:
    """Everything but the mean of the whole batch is of a sequence alone."""
    log = random_case(seed)
    chosen = CorrectionSettings(**{**vars(chosen), "normalize": False})
    parts = [correct(*(x[i : i + 1] for x in log), chosen) for i in range(len(log.mask))]
    whole = correct(*log, chosen)
    assert torch.equal(torch.cat([part.weights_BT for part in parts]), whole.weights_BT)
    assert torch.equal(torch.cat([part.mask_BT for part in parts]), whole.mask_BT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_statistics_are_float32_whatever_comes_and_inputs_stay(dtype: torch.dtype) -> None:
    log = random_case(3)
    low = [log.old.to(dtype).requires_grad_(), log.rollout.to(dtype), log.mask.to(dtype)]
    before = [x.detach().clone() for x in low]
    chosen = CorrectionSettings(level="sequence", rejection={"token_k3": 0.5}, normalize=True)
    result = correct(*low, chosen)
    upcast = correct(*(x.detach().float() for x in low), chosen)
    assert result.weights_BT.dtype == torch.float32 and result.mask_BT.dtype == torch.bool
    assert not result.weights_BT.requires_grad
    assert torch.equal(result.weights_BT, upcast.weights_BT)
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, low, strict=True))


@many
@given(seed=st.integers(0, 10**6), level=st.sampled_from(LEVELS), outside=st.sampled_from(OUTSIDE))
def test_on_policy_nothing_happens(seed: int, level: str, outside: str) -> None:
    """Exactly: every ratio is 1, and 1 is inside of all bounds."""
    log = random_case(seed)
    rules: dict[str, Any] = {name: (1.0, 1.0) if name.endswith("ratio") else 0.0 for name in REJECTIONS}
    chosen = CorrectionSettings(level=level, outside=outside, lower=1.0, upper=1.0, normalize=True, rejection=rules)
    result = correct(log.rollout, log.rollout, log.mask, chosen)
    assert torch.equal(result.mask_BT, log.mask) and torch.equal(result.weights_BT, log.mask.float())


def two_tokens_that_drifted() -> Log:
    """Ratios 4, 1/4, 1, 1 of one sequence."""
    rollout = torch.full((1, 4), -2.0, dtype=torch.float64)
    return Log(rollout + torch.tensor([[4.0, 0.25, 1.0, 1.0]]).double().log(), rollout, torch.ones(1, 4))


@pytest.mark.parametrize(
    ("chosen", "weights", "kept"),
    [
        ({"level": "token", "upper": 2.0}, [2.0, 0.25, 1.0, 1.0], [1, 1, 1, 1]),  # TIS
        ({"level": "token", "upper": 2.0, "outside": "mask"}, [0.0, 0.25, 1.0, 1.0], [0, 1, 1, 1]),  # MIS
        (
            {"level": "token", "lower": 0.5, "upper": 5.0, "outside": "mask"},
            [4.0, 0.0, 1.0, 1.0],
            [1, 0, 1, 1],
        ),  # IcePop
        ({"level": "token", "lower": 0.5, "upper": 3.0, "outside": "zero"}, [0.0, 0.0, 1.0, 1.0], [1, 1, 1, 1]),
        ({"level": "token", "lower": 0.5, "upper": 2.0}, [2.0, 0.5, 1.0, 1.0], [1, 1, 1, 1]),
        ({"level": "token", "upper": None}, [4.0, 0.25, 1.0, 1.0], [1, 1, 1, 1]),
        ({"level": "sequence"}, [1.0] * 4, [1] * 4),
        ({"level": "token", "upper": None, "normalize": True}, [2.56, 0.16, 0.64, 0.64], [1] * 4),
        ({"level": "none", "upper": 0.1}, [1.0] * 4, [1] * 4),  # bounds are those of weights
        ({"rejection": {"token_ratio": (0.5, 2.0)}}, [0.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]),
        ({"rejection": {"sequence_max_ratio": (0.3, None)}}, [0.0] * 4, [0] * 4),
        ({"rejection": {"sequence_max_ratio": (0.2, None)}}, [1.0] * 4, [1] * 4),
        ({"rejection": {"sequence_sum_ratio": (0.99, 1.01)}}, [1.0] * 4, [1] * 4),
        ({"rejection": {"sequence_mean_abs": 0.69}}, [0.0] * 4, [0] * 4),  # (log 4 + log 4) / 4 = 0.693
        ({"rejection": {"sequence_mean_abs": 0.70}}, [1.0] * 4, [1] * 4),
        ({"rejection": {"token_k1": 1.0}}, [1.0, 0.0, 1.0, 1.0], [1, 0, 1, 1]),
    ],
)
def test_what_each_rule_does(chosen: dict[str, Any], weights: list[float], kept: list[int]) -> None:
    result = correct(*two_tokens_that_drifted(), CorrectionSettings(**chosen))
    assert result.weights_BT[0].tolist() == pytest.approx(weights)
    assert result.mask_BT[0].tolist() == [bool(k) for k in kept]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_turn_the_rollouts_expectation_into_the_policys(level: str) -> None:
    """Over all sequences of two tokens out of three: sum q w f = sum p f, exactly what importance weights are for.

    By sequence for any f; by token for an f of that token where what came before is equally likely under both.
    """
    generator = torch.Generator().manual_seed(5)
    p, q = (torch.randn(3, 4, generator=generator).double().log_softmax(0) for _ in range(2))  # one column a context
    if level == "token":
        p[:, 3] = q[:, 3]
    pairs = [(a, b) for a in range(3) for b in range(3)]
    log_p, log_q = (torch.stack([torch.stack([x[a, 3], x[b, a]]) for a, b in pairs]) for x in (p, q))
    f = torch.randn(9, generator=generator).double()
    weights = correct(log_p, log_q, torch.ones(9, 2), CorrectionSettings(level=level, upper=None)).weights_BT[:, 1]
    under_q, under_p = (log_q.sum(1).exp() * weights * f).sum(), (log_p.sum(1).exp() * f).sum()
    assert float(under_q) == pytest.approx(float(under_p), rel=1e-6)


def test_a_log_ratio_is_held_within_20() -> None:
    old, rollout = torch.tensor([[-1.0, -INF, -1.0]]), torch.tensor([[-INF, -1.0, -1.0]])
    mask = torch.ones(1, 3)
    token = correct(old, rollout, mask, CorrectionSettings(level="token", upper=None))
    assert token.weights_BT[0].tolist() == pytest.approx([math.exp(20), math.exp(-20), 1.0], rel=1e-5)
    product = correct(
        torch.zeros(1, 9), torch.full((1, 9), -15.0), torch.ones(1, 9), CorrectionSettings(level="sequence", upper=None)
    )
    assert float(product.weights_BT[0, 0]) == pytest.approx(math.exp(20), rel=1e-5)


def test_bypass_needs_no_old_log_probs() -> None:
    log = random_case(4)
    result = correct(None, log.rollout, log.mask, CorrectionSettings(bypass=True))
    assert torch.equal(result.mask_BT, log.mask) and torch.equal(result.weights_BT, log.mask.float())
    assert result.metrics["effective_sample_size"] == pytest.approx(1.0)
    assert not CorrectionSettings(bypass=True).acts and not CorrectionSettings().acts
    assert CorrectionSettings(level="token").acts and CorrectionSettings(rejection={"token_k3": 1}).acts
    with pytest.raises(ValueError, match="old_log_probs_BT is needed unless bypass is set"):
        correct(None, log.rollout, log.mask, CorrectionSettings())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"level": "tokens"}, "level is 'tokens'; it may be none, token, sequence, geometric"),
        ({"outside": "clip"}, "outside is 'clip'; it may be truncate, mask, zero"),
        ({"upper": 0}, "upper is 0; it must be above 0, or none"),
        ({"upper": NAN}, "upper is nan"),
        ({"upper": "2"}, "upper is '2'"),
        ({"lower": -0.5}, "lower is -0.5; it must be at least 0, or none"),
        ({"lower": 3.0}, "lower is 3.0 and upper is 2.0; lower must not be above upper"),
        ({"rejection": ["token_k3"]}, r"rejection is \['token_k3'\]; it must hold a bound under each name"),
        ({"rejection": {"token_k4": 1.0}}, "no rejection by 'token_k4'; did you mean 'token_k3'"),
        ({"rejection": {"token_k3": None}}, "rejection token_k3 is None; it must be an upper bound, or a lower and"),
        ({"rejection": {"token_k3": (None, None)}}, "rejection token_k3 is"),
        ({"rejection": {"token_k3": (1, 2, 3)}}, "rejection token_k3 is"),
        ({"rejection": {"token_k3": True}}, "rejection token_k3 is True"),
        ({"rejection": {"token_k3": "0.1_2"}}, "rejection token_k3 is '0.1_2'"),
        ({"rejection": {"token_ratio": (2.0, 0.5)}}, "the lower bound must not be above the upper one"),
        ({"rejection": {"token_k2": -1.0}}, "rejection token_k2 is -1.0; it is never below 0"),
        ({"bypass": "yes"}, "bypass is 'yes'; it must be true or false"),
        ({"normalize": "no"}, "normalize is 'no'; it must be true or false"),
        ({"level": ["token"]}, r"level is \['token'\]; it may be"),
        ({"bypass": True, "level": "token"}, "bypass leaves nothing to correct"),
        ({"bypass": True, "rejection": {"token_k3": 1.0}}, "bypass leaves nothing to correct"),
    ],
)
def test_settings_that_are_not_possible(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CorrectionSettings(**wrong)


def test_what_is_not_defined_is_named() -> None:
    ones = torch.ones(2, 3)
    old = torch.full((2, 3), -1.0)
    old[1, 2] = NAN
    with pytest.raises(
        ValueError, match="token 2 of sample 1 has nan in old_log_probs_BT and 1.0 in rollout_log_probs_BT"
    ):
        correct(old, ones, ones, CorrectionSettings())
    for shapes, said in (((3, 2), "old_log_probs_BT is"), ((2, 3), "rollout_log_probs_BT is")):
        other = torch.zeros(3, 2) if shapes == (2, 3) else torch.zeros(2, 3)
        with pytest.raises(ValueError, match=said):
            correct(torch.zeros(shapes), other, ones, CorrectionSettings())


@pytest.mark.parametrize(
    "chosen", [CorrectionSettings(), CorrectionSettings(bypass=True), CorrectionSettings(level="token")]
)
def test_the_mask_that_comes_back_is_not_the_one_that_went_in(chosen: CorrectionSettings) -> None:
    ones = torch.ones(2, 3, dtype=torch.bool)
    correct(ones.float(), ones.float(), ones, chosen).mask_BT.zero_()
    assert ones.all()
