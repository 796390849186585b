"""KL(pi || pi_ref): estimates from the log-probs of sampled tokens, and the exact value from logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.checks import check_number, check_shapes
from megarl.algorithms.masking import as_mask, log_ratio, working

K3_LIMIT = 10.0  # k3 grows like exp(d): one token that the policy has all but given up must not own the loss
_LOG_PROB_FLOOR = (
    -1e4
)  # stands for log 0, so that what the other distribution rules out costs much, not infinitely much


def _k3(d_BT: Tensor) -> Tensor:
    return (torch.expm1(d_BT) - d_BT).clamp(0.0, K3_LIMIT)


def _k2(d_BT: Tensor) -> Tensor:
    return d_BT.square() / 2


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": torch.neg, "abs": torch.abs, "k2": _k2, "k3": _k3}
_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
_PLAIN = (*_ESTIMATORS, *_ALIASES)
KL_ESTIMATORS = (*_PLAIN, *(f"{name}+" for name in _PLAIN))
_LEAST_REST = 1e-6  # probability
DIRECTIONS = ("reverse", "forward")
# Not from sampled tokens but from whole distributions, of which the engine makes `exact_kl`, and what it needs of the reference.
EXACT_KL = {"full": ("ref_hidden",), "top_k": ("ref_top_ids", "ref_top_log_probs", "ref_log_rest")}


def check_estimator(estimator: str) -> None:
    """ValueError on what is none of KL_ESTIMATORS."""
    if estimator not in KL_ESTIMATORS:
        hint = "; 'full' is from logits: full_kl" if estimator in ("full", "full+") else ""
        raise ValueError(f"no KL estimator {estimator!r}; there are {', '.join(KL_ESTIMATORS)}{hint}")


def kl(log_probs_BT: Tensor, ref_log_probs_BT: Tensor, mask_BT: Tensor, estimator: str = "k3") -> Tensor:
    """(B, T), 0 where masked, with d = log pi_ref - log pi within ±20 (http://joschu.net/blog/kl-approx.html):

    k1 ("kl") -d, unbiased; k2 ("mse") d^2 / 2; k3 ("low_var_kl") exp(d) - d - 1, never negative, at most 10; abs |d|.
    With a "+" (k1+, k3+, ...): that value with the gradient of k2, the only one of them whose expected gradient, over
    samples of pi, is the gradient of the KL (arXiv:2506.09477). ValueError on another estimator, and on shapes that differ.
    """
    check_estimator(estimator)
    check_shapes(mask_BT=mask_BT, log_probs_BT=log_probs_BT, ref_log_probs_BT=ref_log_probs_BT)
    plain = estimator.removesuffix("+")
    name = _ALIASES.get(plain, plain)
    d_BT = log_ratio(ref_log_probs_BT, log_probs_BT, mask_BT)
    if plain == estimator or name == "k2":
        return _ESTIMATORS[name](d_BT)
    square_BT = _k2(d_BT)
    return _ESTIMATORS[name](d_BT.detach()) + (square_BT - square_BT.detach())


def full_kl(
    logits_NV: Tensor,
    ref_logits_NV: Tensor,
    *,
    temperature: float = 1.0,
    direction: str = "reverse",
    mask_N: Tensor | None = None,
) -> Tensor:
    """(N,) exact KL of each token's distributions p = softmax(logits / temperature) and q, the reference's, in nats.

    direction "reverse": KL(p || q) = sum_v p (log p - log q), with d/dz = p (log p - log q - KL) / temperature;
    "forward": KL(q || p) = sum_v q (log q - log p), with d/dz = (p - q) / temperature. The reference has no gradient.

    For a chunk of N tokens: it holds a few tensors of the chunk's size while it runs and keeps none, so a caller that makes
    the logits of one chunk at a time never has more. A log-prob counts as -1e4 at least. 0 where masked. Logits that are no
    distribution (NaN, +inf, a row of -inf alone) give NaN, which nothing hides. ValueError on another direction, a temperature
    that is not above 0, or shapes that differ.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction is {direction!r}; it may be 'reverse', KL(pi || ref), or 'forward', KL(ref || pi)")
    check_number("temperature", temperature, above=0)
    if logits_NV.dim() != 2 or logits_NV.shape != ref_logits_NV.shape:
        shapes = f"{tuple(logits_NV.shape)} and {tuple(ref_logits_NV.shape)}"
        raise ValueError(f"logits_NV and ref_logits_NV are {shapes}; they must be one (tokens, vocabulary)")
    check_shapes(logits_NV=logits_NV, mask_N=mask_N)
    values_N: Tensor = _FullKL.apply(logits_NV, ref_logits_NV, temperature, direction, mask_N)
    return values_N


def top_k_kl(
    log_probs_NK: Tensor,
    ref_log_probs_NK: Tensor,
    log_rest_N: Tensor | None = None,
    ref_log_rest_N: Tensor | None = None,
) -> Tensor:
    """(N,) KL(p || q) over K + 1 outcomes, in nats: K tokens (the reference's likeliest) and all others together as one.

    With P and Q the others' mass: sum_k p_k (log p_k - log q_k) + P (log P - log Q). At most the KL over the whole vocabulary,
    since outcomes put together tell distributions apart no better, and equal to it where the others differ by a factor alone.
    Where log P and log Q are not given, they are 1 - sum_k p_k and 1 - sum_k q_k, and count as 1e-6 at least, below which float32
    knows nothing of them. A log-prob counts as -1e4 at least. Summed as p (log p - log q) - p + q: of equal distributions value and
    gradient are 0 without rounding. The reference has no gradient. ValueError on shapes that differ.
    """
    if log_probs_NK.dim() != 2 or log_probs_NK.shape != ref_log_probs_NK.shape:
        shapes = f"{tuple(log_probs_NK.shape)} and {tuple(ref_log_probs_NK.shape)}"
        raise ValueError(f"log_probs_NK and ref_log_probs_NK are {shapes}; they must be one (tokens, k)")
    log_p = _with_rest(log_probs_NK, log_rest_N)
    log_q = _with_rest(ref_log_probs_NK.detach(), None if ref_log_rest_N is None else ref_log_rest_N.detach())
    p = log_p.exp()
    return (p * (log_p - log_q) - p + log_q.exp()).sum(-1)


def _with_rest(log_probs_NK: Tensor, log_rest_N: Tensor | None) -> Tensor:
    """(N, K + 1) log-probs of K tokens and of the rest."""
    log_p_NK = working(log_probs_NK)
    if log_rest_N is None:
        log_rest_N = (1.0 - log_p_NK.exp().sum(-1)).clamp(min=_LEAST_REST).log()
    return torch.cat([log_p_NK, log_rest_N.to(log_p_NK)[:, None]], dim=1).clamp(min=_LOG_PROB_FLOOR)


class _FullKL(torch.autograd.Function):
    """Keeps the logits that are there anyway, and makes the distributions again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, ref_logits_NV: Tensor, temperature: float, direction: str, mask_N: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(logits_NV, ref_logits_NV)
        ctx.rest = (temperature, direction, mask_N)
        return _divergence(logits_NV, ref_logits_NV, temperature, direction, mask_N)[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        logits_NV, ref_logits_NV = ctx.saved_tensors
        temperature, direction, mask_N = ctx.rest
        value_N, p_NV, other_NV = _divergence(logits_NV, ref_logits_NV, temperature, direction, mask_N)
        reverse = direction == "reverse"
        slope_NV = other_NV.sub_(value_N[:, None]).mul_(p_NV) if reverse else p_NV.sub_(other_NV)
        slope_NV.mul_((grad_outputs[0] / temperature)[:, None])
        if mask_N is not None:  # a product with 0 would let NaN through
            slope_NV.masked_fill_(~as_mask(mask_N)[:, None], 0.0)
        return slope_NV.to(logits_NV.dtype), None, None, None, None


def _divergence(
    logits_NV: Tensor, ref_logits_NV: Tensor, temperature: float, direction: str, mask_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(KL, p, log p - log q) where reversed, (KL, p, q) where forward."""
    log_p_NV = torch.log_softmax(working(logits_NV) / temperature, -1).clamp_(min=_LOG_PROB_FLOOR)
    log_q_NV = torch.log_softmax(working(ref_logits_NV) / temperature, -1).clamp_(min=_LOG_PROB_FLOOR)
    if direction == "reverse":
        gap_NV = log_q_NV.neg_().add_(log_p_NV)
        p_NV = log_p_NV.exp_()
        value_N, other_NV = torch.linalg.vecdot(p_NV, gap_NV), gap_NV
    else:
        q_NV = log_q_NV.exp()
        value_N = torch.linalg.vecdot(q_NV, log_q_NV.sub_(log_p_NV))
        p_NV, other_NV = log_p_NV.exp_(), q_NV
    value_N = value_N.clamp_(min=0.0)  # rounding
    return value_N if mask_N is None else torch.where(as_mask(mask_N), value_N, 0.0), p_NV, other_NV
