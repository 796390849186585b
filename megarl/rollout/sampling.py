"""How responses are sampled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy, and its log-probs are then those of temperature 1."""

    n: int = 1  # samples a prompt
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all tokens
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end-of-sequence tokens
