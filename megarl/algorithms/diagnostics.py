"""How far two policies are apart, told from the tokens that one of them sampled."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megarl.algorithms.checks import check_shapes
from megarl.algorithms.masking import LOG_RATIO_LIMIT, as_mask, keep
from megarl.algorithms.rollout_correction import checked_log_ratio

PERCENTILES = (50, 90, 99)


@torch.no_grad()
def off_policy_diagnostics(log_probs_BT: Tensor, behaviour_log_probs_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """Plain finite floats. behaviour_log_probs_BT: of the policy q that sampled; log_probs_BT: of another, p.

    With d = log p - log q of a token within ±20, S = the sum of d over a sequence within ±20, means over unmasked tokens or over
    sequences that have one:
        kl, k3                    KL(q || p): mean of -d, and of exp(d) - d - 1 (http://joschu.net/blog/kl-approx.html)
        chi2_token, chi2_sequence chi^2(p || q): mean of exp(2 d) - 1, and of exp(2 S) - 1
        effective_sample_size     (sum r)^2 / (n sum r^2) of the ratios r = exp(d), a share of the tokens;
                                  effective_sample_size_sequence the same of exp(S), a share of the sequences
        perplexity, behaviour_perplexity, perplexity_ratio: means over sequences of exp(-mean log p), exp(-mean log q) and
                                  exp(-mean d); a mean log-prob is within ±20
        abs_mean, abs_max, abs_p50, abs_p90, abs_p99: of |d|; a percentile is the smallest value that so many do not exceed
        pearson                   correlation of p and q; where one of them does not vary, 1 if they are equal and 0 if not
    Nothing unmasked: what two equal policies would have. ValueError on shapes that differ, and on a ratio that is not a number.
    """
    check_shapes(mask_BT=mask_BT, log_probs_BT=log_probs_BT, behaviour_log_probs_BT=behaviour_log_probs_BT)
    mask_BT = as_mask(mask_BT)
    drift_BT = checked_log_ratio(
        log_probs_BT, behaviour_log_probs_BT, mask_BT, "log_probs_BT", "behaviour_log_probs_BT"
    )
    # No probability is above 1, whatever rounding made of its logarithm.
    log_p_BT = keep(log_probs_BT, mask_BT).clamp(max=0.0)
    log_q_BT = keep(behaviour_log_probs_BT, mask_BT).clamp(max=0.0)
    tokens_S = mask_BT.sum(-1)
    occupied = tokens_S > 0  # S: the sequences that have a token
    tokens_S = tokens_S[occupied]
    drift_N = drift_BT[mask_BT]  # N: the unmasked tokens
    total_S = _limited(drift_BT[occupied].sum(-1))
    distance_N = drift_N.abs()
    result = {
        "kl": _mean(-drift_N),
        "k3": _mean((torch.expm1(drift_N) - drift_N).clamp(min=0.0)),
        # Not as a mean of squares less 1: policies that are close would leave rounding noise.
        "chi2_token": _mean(torch.expm1(2 * drift_N)),
        "chi2_sequence": _mean(torch.expm1(2 * total_S)),
        "effective_sample_size": _effective_share(drift_N),
        "effective_sample_size_sequence": _effective_share(total_S),
        "perplexity": _mean(_limited(-log_p_BT[occupied].sum(-1) / tokens_S).exp(), empty=1.0),
        "behaviour_perplexity": _mean(_limited(-log_q_BT[occupied].sum(-1) / tokens_S).exp(), empty=1.0),
        "perplexity_ratio": _mean((-drift_BT[occupied].sum(-1) / tokens_S).exp(), empty=1.0),
        "abs_mean": _mean(distance_N),
        "abs_max": distance_N.amax() if len(distance_N) else _mean(distance_N),
        "pearson": _pearson(log_p_BT[mask_BT].exp(), log_q_BT[mask_BT].exp()),
    }
    result |= {f"abs_p{percent}": _percentile(distance_N, percent) for percent in PERCENTILES}
    # One transfer for all numbers: each would be its own wait on a GPU.
    return dict(zip(result, torch.stack(list(result.values())).tolist(), strict=True))


def _limited(values: Tensor) -> Tensor:
    return values.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _mean(values_N: Tensor, empty: float = 0.0) -> Tensor:
    return values_N.mean() if len(values_N) else values_N.new_tensor(empty)


def _effective_share(log_weight_N: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2), of weights relative to the largest so that neither sum can be lost or overflow."""
    if not len(log_weight_N):
        return log_weight_N.new_tensor(1.0)
    weight_N = (log_weight_N - log_weight_N.amax()).exp()
    return weight_N.sum().square() / (len(weight_N) * weight_N.square().sum())


def _percentile(values_N: Tensor, percent: int) -> Tensor:
    """Nearest rank: a value that is there, found without sorting the others."""
    if not len(values_N):
        return values_N.new_zeros(())
    return values_N.kthvalue(max(1, math.ceil(percent * len(values_N) / 100))).values


def _pearson(p_N: Tensor, q_N: Tensor) -> Tensor:
    if not len(p_N):
        return p_N.new_tensor(1.0)
    same = (p_N == q_N).all().to(p_N.dtype)
    p_N, q_N = _centred(p_N), _centred(q_N)
    norms = p_N.norm() * q_N.norm()
    return torch.where(norms > 0, (p_N * q_N).sum() / norms, same).clamp(-1.0, 1.0)


def _centred(values_N: Tensor) -> Tensor:
    """Values less their mean, scaled so that the largest is 1 (no square is lost); exactly 0 where all are equal."""
    above_N = values_N - values_N.amin()
    centred_N = above_N - above_N.mean()
    largest = centred_N.abs().amax()
    return torch.where(largest > 0, centred_N / largest, 0.0)
