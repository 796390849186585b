"""Advantages from rewards. Each estimator is its formula; its source is in its docstring.

All take rewards and a mask of shape (B, T) and give an `Advantage` of that shape, 0 where masked. They run once, on the
whole batch of all data-parallel ranks, so that what is said of a batch is said of all of it.
"""

from __future__ import annotations

from megarl.algorithms.advantages.base import Advantage, AdvantageFunction, advantage, get_advantage, spread
from megarl.algorithms.advantages.decoupled import gdpo
from megarl.algorithms.advantages.gae import gae
from megarl.algorithms.advantages.group_relative import gpg, group_norm, grpo, opo, rloo
from megarl.algorithms.advantages.pass_at_k import grpo_passk
from megarl.algorithms.advantages.reinforce import reinforce_plus_plus, reinforce_plus_plus_baseline, remax
from megarl.algorithms.advantages.token_baseline import optimal_token_baseline

__all__ = [
    "Advantage",
    "AdvantageFunction",
    "advantage",
    "gae",
    "gdpo",
    "get_advantage",
    "gpg",
    "group_norm",
    "grpo",
    "grpo_passk",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "spread",
]
