"""How responses are sampled, what an engine is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy, and its log-probs are then those of temperature 1."""

    n: int = 1  # samples a prompt
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all tokens
    min_p: float = 0.0  # leave out tokens less likely than this share of the likeliest one's probability
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end-of-sequence tokens
    stop: tuple[str, ...] = ()  # a response ends with the token that completes one of these texts


class Ask(NamedTuple):
    """One response that is wanted, or the rest of one."""

    key: int  # no other ask of the run has it
    prompt_ids: list[int]
    begun_ids: list[int]  # what there is of the response; sampling goes on behind it
    budget: int  # new tokens at most
    seed: int = 0  # of the response, the same for all its pieces; on a GPU only with enable_deterministic_inference


class Answer(NamedTuple):
    """What an engine added to an ask. `stop_reason` is "abort" where it was stopped before it was done."""

    key: int
    token_ids: list[int]
    log_probs: list[float]  # one a token
    stop_reason: str  # stop | length | abort
    weight_version: int


class Progress(NamedTuple):
    """Answers since the last time, and how many tokens the engine has sampled since it started."""

    answers: list[Answer]
    tokens: int
