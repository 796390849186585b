"""Sizes that follow from a configuration alone."""

from __future__ import annotations

import math

from megarl.config import Config


def cache_tokens(cfg: Config, engines: int, oversample: float) -> int:
    """Tokens of the KV cache of one of so many engines that holds its part of a step at once, every prompt and response at its
    longest. `oversample`: so many times a step's groups are sampled at one time."""
    r, d = cfg.rollout, cfg.data
    groups = math.ceil(math.ceil(d.prompts_per_step * oversample) / engines)
    return groups * (d.max_prompt_tokens + r.n * (r.max_new_tokens + 1)) + 1024
