"""A user's own functions, named in configurations by their dotted path. Some of them wait, so that a test knows where a run is."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist

from megarl.algorithms.policy_losses import get_policy_loss

_vanilla = get_policy_loss("vanilla")


def share_of_vowels(text: str, answer: Any, payload: dict) -> float:
    """Random models answer no sum, but no two of their answers have the same letters."""
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


def waiting_reward(text: str, answer: Any, payload: dict) -> float:
    _wait()
    return share_of_vowels(text, answer, payload)


def waiting_loss(log_probs_BT, old_log_probs_BT, advantages_BT, mask_BT, *, clip_low, clip_high, clip_dual):
    _wait()
    return _vanilla(
        log_probs_BT,
        old_log_probs_BT,
        advantages_BT,
        mask_BT,
        clip_low=clip_low,
        clip_high=clip_high,
        clip_dual=clip_dual,
    )


def breaking_loss(log_probs_BT, old_log_probs_BT, advantages_BT, mask_BT, *, clip_low, clip_high, clip_dual):
    """Fails on one rank only; the others wait for it in a collective."""
    if dist.is_initialized() and dist.get_rank() == 1:
        Path(os.environ["MEGARL_TEST_REACHED"]).touch()
        raise ArithmeticError("no luck on this rank")
    return _vanilla(
        log_probs_BT,
        old_log_probs_BT,
        advantages_BT,
        mask_BT,
        clip_low=clip_low,
        clip_high=clip_high,
        clip_dual=clip_dual,
    )


def _wait() -> None:
    """Say that this place is reached and stay a while; longer than anybody may take to end a run. Not where functions are tried
    before it begins."""
    if not ray.is_initialized():
        return
    Path(os.environ["MEGARL_TEST_REACHED"]).touch()
    time.sleep(30)
