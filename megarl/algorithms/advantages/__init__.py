"""Advantages from rewards. Each estimator is its formula; its source is in its docstring.

All take rewards and a mask of shape (B, T) and give an `Advantage` of that shape, 0 where masked. They run once, on the
whole batch of all data-parallel ranks, so that what is said of a batch is said of all of it.
"""

from __future__ import annotations

from megarl.algorithms.advantages.base import Advantage, AdvantageFunction, advantage, get_advantage, spread
from megarl.algorithms.advantages.group_relative import grpo

__all__ = ["Advantage", "AdvantageFunction", "advantage", "get_advantage", "grpo", "spread"]
