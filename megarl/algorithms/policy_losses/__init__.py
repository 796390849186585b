"""Policy losses, one value a token. Aggregation and the division by global denominators happen elsewhere, once."""

from __future__ import annotations

from megarl.algorithms.policy_losses.base import PolicyLoss, PolicyLossFunction, get_policy_loss, policy_loss
from megarl.algorithms.policy_losses.cispo import cispo
from megarl.algorithms.policy_losses.covariance import clip_cov, kl_cov
from megarl.algorithms.policy_losses.decoupled import decoupled
from megarl.algorithms.policy_losses.dppo import dppo_kl, dppo_tv
from megarl.algorithms.policy_losses.dro import dro
from megarl.algorithms.policy_losses.geo_mean import geo_mean
from megarl.algorithms.policy_losses.gspo import gspo
from megarl.algorithms.policy_losses.policy_gradient import gpg, reinforce
from megarl.algorithms.policy_losses.sapo import sapo
from megarl.algorithms.policy_losses.vanilla import vanilla

__all__ = [
    "PolicyLoss",
    "PolicyLossFunction",
    "cispo",
    "clip_cov",
    "decoupled",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "get_policy_loss",
    "gpg",
    "gspo",
    "kl_cov",
    "policy_loss",
    "reinforce",
    "sapo",
    "vanilla",
]
