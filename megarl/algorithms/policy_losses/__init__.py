"""Policy losses, one value a token. Aggregation and the division by global denominators happen elsewhere, once."""

from __future__ import annotations

from megarl.algorithms.policy_losses.base import PolicyLoss, PolicyLossFunction, get_policy_loss, policy_loss
from megarl.algorithms.policy_losses.covariance import clip_cov, kl_cov
from megarl.algorithms.policy_losses.vanilla import vanilla

__all__ = [
    "PolicyLoss",
    "PolicyLossFunction",
    "clip_cov",
    "get_policy_loss",
    "kl_cov",
    "policy_loss",
    "vanilla",
]
