"""Rewards: the registered rules, a user's own function, and the one who asks them."""

from megarl.rewards import rules  # noqa: F401  (registers its rewards)
from megarl.rewards.registry import REWARDS, check_reward, get_reward, reward
from megarl.rewards.rewarder import Rewarder, accuracy

__all__ = ["REWARDS", "Rewarder", "accuracy", "check_reward", "get_reward", "reward"]
