"""Corrects for samples that another policy drew than the one that is trained: the engine's numerics, or older weights.

Everything is of the ratio r = pi_old / pi_rollout of a token, pi_old the policy at the start of the update as the trainer computes
it, pi_rollout the policy as the engine sampled from it: importance weights that multiply the loss, and rejection that takes tokens
or whole sequences out of the loss mask, so that they are in no denominator either.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms.checks import check_choice, check_flag, check_number, check_shapes, is_number
from megarl.algorithms.masking import LOG_RATIO_LIMIT, as_mask, log_ratio, working

LEVELS = ("none", "token", "sequence", "geometric")
OUTSIDE = ("truncate", "mask", "zero")

_MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "ratio": lambda d_BT: d_BT,  # compared with the logarithms of its bounds
    "abs": torch.abs,
    "k1": torch.neg,
    "k2": lambda d_BT: d_BT.square() / 2,
    "k3": lambda d_BT: (torch.expm1(d_BT) - d_BT).clamp(min=0.0),  # without the cap of the loss: a bound must see it
}
_REACHES = ("token", "sequence_sum", "sequence_mean", "sequence_max")
REJECTIONS = tuple(f"{reach}_{measure}" for reach in _REACHES for measure in _MEASURES)

Bounds = tuple[float, float]


@dataclass(frozen=True)
class CorrectionSettings:
    """Plain values; ValueError where one is not possible. With d_t = log r_t of token t of a sequence of n tokens:

    bypass: pi_old := pi_rollout. There is nothing to correct then (the policy loss's own ratio is against the engine's
        log-probs), so every weight is 1 and nothing is rejected.
    level: the weight w of a token: "none" 1, "token" r_t, "sequence" the product exp(sum d) of its sequence, "geometric" the
        mean exp(sum d / n) of its sequence.
    outside: what becomes of a weight outside [lower, upper] (None: open): "truncate" moves it to the bound, "mask" takes the
        token out of the loss and of its denominators, "zero" makes it 0 and lets it count.
        Truncated importance sampling (TIS, https://fengyao.notion.site/off-policy-rl): truncate with upper = C.
        Masked importance sampling (MIS, https://richardli.xyz/rl-collapse): mask with upper = C, by token or by sequence.
        IcePop (arXiv:2510.18855): level token, mask (or zero) with lower = alpha, upper = beta, there 0.5 and 5.
    normalize: divide the weights by their mean over the tokens that are kept.
    rejection: bounds by the name of what is bounded, as `upper` or `(lower, upper)`, None for an open side; what breaks any
        of them is taken out of the loss. Names are REACH_MEASURE. Measures of a token: ratio r; k1 = -d, k2 = d^2 / 2,
        k3 = exp(d) - d - 1, estimates of KL(rollout || old); abs = |d|. Reaches: token, rejected by itself; sequence_sum and
        sequence_mean, rejected by its sum or mean (of ratio: its product or geometric mean); sequence_max, rejected where one of
        its tokens is out of bounds. So {"sequence_mean_k3": 0.01}, or {"sequence_max_ratio": (1e-4, None)}.
    """

    bypass: bool = False
    level: str = "none"
    outside: str = "truncate"
    upper: float | None = 2.0
    lower: float | None = None
    normalize: bool = False
    rejection: Mapping[str, float | Sequence[float | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, choices in (("level", LEVELS), ("outside", OUTSIDE)):
            check_choice(name, getattr(self, name), choices)
        for name in ("bypass", "normalize"):
            check_flag(name, getattr(self, name))
        check_number("upper", self.upper, above=0, none=True)
        check_number("lower", self.lower, least=0, none=True)
        if self.upper is not None and self.lower is not None and self.lower > self.upper:
            raise ValueError(f"lower is {self.lower} and upper is {self.upper}; lower must not be above upper")
        if not isinstance(self.rejection, Mapping):
            raise ValueError(f"rejection is {self.rejection!r}; it must hold a bound under each name")
        for name, bound in self.rejection.items():
            _bounds(name, bound)
        if self.bypass and (self.level != "none" or self.rejection):
            raise ValueError("bypass leaves nothing to correct: it needs level 'none' and no rejection")

    @property
    def acts(self) -> bool:
        """Whether anything could differ from weights of 1 and the mask as it was."""
        return not self.bypass and (self.level != "none" or bool(self.rejection))


class Correction(NamedTuple):
    """What the update takes in place of the batch's own; nothing here has a gradient."""

    weights_BT: Tensor  # float32, 0 where not kept
    mask_BT: Tensor  # bool: the tokens kept; the loss mask from here on, and what denominators are counted from
    metrics: dict[str, float]


@torch.no_grad()
def correct(
    old_log_probs_BT: Tensor | None, rollout_log_probs_BT: Tensor, mask_BT: Tensor, settings: CorrectionSettings
) -> Correction:
    """Weights and mask of a whole batch; `old_log_probs_BT` may be None with bypass. See `CorrectionSettings` for formulas.

    Every statistic is of the mask as it was given, so the order of the rules does not matter. d is within ±20 by token, and its sum
    too where it becomes a weight. ValueError on shapes that differ and on a ratio that is not a number at an unmasked place.

    Metrics, of the unmasked tokens (sequences: those that have one), 0 where there are none:
        outside_fraction, outside_sequence_fraction: with a weight outside [lower, upper]; sequences with such a token
        rejected_fraction, rejected_sequence_fraction: taken out of the mask; sequences taken out whole
        rejected_by_NAME_fraction: tokens that this rule takes out
        weight_mean, weight_min, weight_max: over the tokens kept, before normalising; weight_scale: what they are divided by
        effective_sample_size: (sum w)^2 / (n sum w^2), with n of before rejection; by sequence at the levels of sequences
    """
    check_shapes(mask_BT=mask_BT, rollout_log_probs_BT=rollout_log_probs_BT, old_log_probs_BT=old_log_probs_BT)
    given_BT, mask_BT = mask_BT, as_mask(mask_BT)
    drift_BT = _drift(old_log_probs_BT, rollout_log_probs_BT, mask_BT, settings.bypass)
    tokens_B = mask_BT.sum(-1)
    kept_BT = mask_BT
    shares: dict[str, Tensor] = {}
    for name, bound in settings.rejection.items():
        inside_BT = _inside(name, bound, drift_BT, mask_BT, tokens_B)
        shares[f"rejected_by_{name}_fraction"] = _share(mask_BT & ~inside_BT, mask_BT)
        kept_BT = kept_BT & inside_BT
    weights_BT = _weights(settings.level, drift_BT, tokens_B)
    outside_BT = mask_BT & _outside(weights_BT, settings)
    if settings.level == "none":
        pass
    elif settings.outside == "truncate":
        weights_BT = weights_BT.clamp(0.0 if settings.lower is None else settings.lower, settings.upper)
    elif settings.outside == "zero":
        weights_BT = torch.where(outside_BT, 0.0, weights_BT)
    else:
        kept_BT = kept_BT & ~outside_BT
    weights_BT = torch.where(kept_BT, weights_BT, 0.0)
    if kept_BT is given_BT:  # the caller may go on to change either
        kept_BT = kept_BT.clone()

    count = kept_BT.sum()
    mean = weights_BT.sum() / count.clamp(min=1)
    scale = torch.where(mean > 0, mean, 1.0) if settings.normalize else torch.ones_like(mean)
    occupied_B = tokens_B > 0
    shares |= {
        "outside_fraction": _share(outside_BT, mask_BT),
        "outside_sequence_fraction": _share(outside_BT.any(-1), occupied_B),
        "rejected_fraction": _share(mask_BT & ~kept_BT, mask_BT),
        "rejected_sequence_fraction": _share(occupied_B & ~kept_BT.any(-1), occupied_B),
        "weight_mean": mean,
        "weight_min": torch.where(count > 0, _least(weights_BT, kept_BT), 0.0),
        "weight_max": weights_BT.amax() if weights_BT.numel() else mean,
        "weight_scale": scale,
        "effective_sample_size": _effective_size(weights_BT, mask_BT, settings.level),
    }
    # One transfer for all numbers: each would be its own wait on a GPU.
    numbers = torch.stack([value.to(mean.dtype) for value in shares.values()]).tolist()
    return Correction((weights_BT / scale).float(), kept_BT, dict(zip(shares, numbers, strict=True)))


def _drift(old_BT: Tensor | None, rollout_BT: Tensor, mask_BT: Tensor, bypass: bool) -> Tensor:
    """(B, T) log r within ±20, 0 where masked."""
    if bypass:
        return torch.zeros_like(working(rollout_BT))
    if old_BT is None:
        raise ValueError("old_log_probs_BT is needed unless bypass is set")
    return checked_log_ratio(old_BT, rollout_BT, mask_BT, "old_log_probs_BT", "rollout_log_probs_BT")


def checked_log_ratio(p_BT: Tensor, q_BT: Tensor, mask_BT: Tensor, p_name: str, q_name: str) -> Tensor:
    """`log_ratio`; ValueError that names the first unmasked place where it is not a number."""
    drift_BT = log_ratio(p_BT, q_BT, mask_BT)
    undefined_BT = drift_BT.isnan()
    if bool(undefined_BT.any()):
        b, t = undefined_BT.nonzero()[0].tolist()
        values = f"{float(p_BT[b, t])} in {p_name} and {float(q_BT[b, t])} in {q_name}"
        raise ValueError(f"token {t} of sample {b} has {values}, which have no ratio")
    return drift_BT


def _weights(level: str, drift_BT: Tensor, tokens_B: Tensor) -> Tensor:
    """(B, T) before bounds; what masked places hold does not matter."""
    if level == "none":
        return torch.ones_like(drift_BT)
    if level == "token":
        return drift_BT.exp()
    log_B = drift_BT.sum(-1)
    if level == "geometric":
        log_B = log_B / tokens_B.clamp(min=1)
    return log_B.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[:, None].expand_as(drift_BT)


def _outside(weights_BT: Tensor, settings: CorrectionSettings) -> Tensor:
    if settings.level == "none":  # the bounds are those of weights, and there are none
        return torch.zeros_like(weights_BT, dtype=torch.bool)
    lower = 0.0 if settings.lower is None else settings.lower
    upper = math.inf if settings.upper is None else settings.upper
    return (weights_BT < lower) | (weights_BT > upper)


def _inside(name: str, bound: Any, drift_BT: Tensor, mask_BT: Tensor, tokens_B: Tensor) -> Tensor:
    """(B, T) bool: the tokens that this rule lets pass; masked places pass."""
    reach, _, measure = name.rpartition("_")
    lower, upper = _bounds(name, bound)
    values_BT = torch.where(mask_BT, _MEASURES[measure](drift_BT), 0.0)
    if reach in ("token", "sequence_max"):
        inside_BT = ~mask_BT | (values_BT >= lower) & (values_BT <= upper)
        return inside_BT if reach == "token" else inside_BT.all(-1, keepdim=True).expand_as(mask_BT)
    value_B = values_BT.sum(-1)
    if reach == "sequence_mean":
        value_B = value_B / tokens_B.clamp(min=1)
    return ((value_B >= lower) & (value_B <= upper))[:, None].expand_as(mask_BT) | ~mask_BT


def _bounds(name: str, bound: Any) -> Bounds:
    """(lower, upper) of a rule, of a ratio as logarithms; ValueError that names the rule."""
    if name not in REJECTIONS:
        near = difflib.get_close_matches(str(name), REJECTIONS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"no rejection by {name!r}{hint} There are {', '.join(REJECTIONS)}")
    pair = list(bound) if isinstance(bound, Sequence) and not isinstance(bound, str) else [None, bound]
    if len(pair) != 2 or not all(side is None or is_number(side) for side in pair) or pair == [None, None]:
        raise ValueError(f"rejection {name} is {bound!r}; it must be an upper bound, or a lower and an upper one")
    lower, upper = (-math.inf if pair[0] is None else pair[0]), (math.inf if pair[1] is None else pair[1])
    if lower > upper:
        raise ValueError(f"rejection {name} is {bound!r}; the lower bound must not be above the upper one")
    if not name.endswith("_k1") and upper < 0:
        raise ValueError(f"rejection {name} is {bound!r}; it is never below 0, so that nothing would be kept")
    if name.endswith("_ratio"):
        return tuple(math.log(side) if side > 0 else -math.inf for side in (lower, upper))  # type: ignore[return-value]
    return lower, upper


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return part.sum() / whole.sum().clamp(min=1)


def _least(values_BT: Tensor, where_BT: Tensor) -> Tensor:
    kept_BT = torch.where(where_BT, values_BT, math.inf)
    return kept_BT.amin() if kept_BT.numel() else kept_BT.new_zeros(())


def _effective_size(weights_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    """(sum w)^2 / (n sum w^2) over tokens, or over sequences where these have one weight each; 0 where nothing weighs."""
    count = mask_BT.sum()
    if level in ("sequence", "geometric") and weights_BT.shape[1]:
        weights_BT, count = weights_BT.amax(-1), mask_BT.any(-1).sum()
    squares = weights_BT.square().sum()
    return torch.where(squares > 0, weights_BT.sum().square() / (count * squares).clamp(min=1e-30), 0.0)
