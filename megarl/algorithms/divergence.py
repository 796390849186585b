"""Estimates of KL(pi || pi_ref) from the log-probs of sampled tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algorithms.masking import log_ratio

K3_LIMIT = 10.0  # k3 grows like exp(d): one token that the policy has all but given up must not own the loss


def _k3(d_BT: Tensor) -> Tensor:
    return (torch.expm1(d_BT) - d_BT).clamp(0.0, K3_LIMIT)


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": torch.neg,
    "abs": torch.abs,
    "k2": lambda d_BT: d_BT.square() / 2,
    "k3": _k3,
}
_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
KL_ESTIMATORS = (*_ESTIMATORS, *_ALIASES)


def kl(log_probs_BT: Tensor, ref_log_probs_BT: Tensor, mask_BT: Tensor, estimator: str = "k3") -> Tensor:
    """(B, T), 0 where masked, with d = log pi_ref - log pi within ±20 (http://joschu.net/blog/kl-approx.html):

    k1 ("kl") -d, unbiased; k2 ("mse") d^2 / 2; k3 ("low_var_kl") exp(d) - d - 1, never negative, at most 10; abs |d|.
    ValueError on another estimator.
    """
    name = _ALIASES.get(estimator, estimator)
    if name not in _ESTIMATORS:
        raise ValueError(f"no KL estimator {estimator!r}; there are {', '.join(KL_ESTIMATORS)}")
    return _ESTIMATORS[name](log_ratio(ref_log_probs_BT, log_probs_BT, mask_BT))
