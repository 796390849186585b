"""Scores what was sampled."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megarl.batch import Batch, Level
from megarl.config.schema import RewardConfig
from megarl.errors import ConfigError, RunError
from megarl.rewards.registry import ANSWER_CHECKS, check_reward, get_reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_PROBLEMS = 10
LARGEST = float(np.finfo(np.float32).max)


class Rewarder:
    """Decodes responses and asks the reward function for a score of each. ConfigError if the reward cannot be used."""

    def __init__(self, config: RewardConfig, tokenizer: PreTrainedTokenizerBase):
        faults = check_reward(config)
        if faults:
            raise ConfigError(faults)
        self.name = config.name
        self.options = dict(config.options)
        self.function = get_reward(config.name)
        self.tokenizer = tokenizer

    def check_answers(self, problems: Sequence[Any]) -> list[str]:
        """The problems (with .answer and .where) whose answers this reward could never compare with: [] if none."""
        check = ANSWER_CHECKS.get(self.name)
        if check is None:
            return []
        faults = []
        for problem in problems:
            try:
                check(problem.answer)
            except ValueError as error:
                faults.append(f"{problem.where}: {error}, which reward {self.name!r} needs")
        hidden = len(faults) - SHOWN_PROBLEMS
        return faults[:SHOWN_PROBLEMS] + ([f"… and {hidden} more like these"] if hidden > 0 else [])

    def score(self, batch: Batch) -> Batch:
        """A batch of the same samples with two fields: reward (SAMPLE, float32) and response_text (SAMPLE, object).

        RunError names the sample and the function where the function raises, or answers anything but a finite number.
        """
        texts = self.texts(batch)
        scores = [self._score_one(batch, at, text) for at, text in enumerate(texts)]
        objects = np.empty(len(texts), dtype=object)
        objects[:] = texts
        scored = batch.select([]).set("reward", torch.tensor(scores, dtype=torch.float32), Level.SAMPLE)
        return scored.set("response_text", objects, Level.SAMPLE)

    def texts(self, batch: Batch) -> list[str]:
        """Every response as text, without special tokens."""
        if not len(batch):  # the tokenizer would decode an empty list to one empty text
            return []
        ends = torch.cumsum(batch.total_lengths, 0).tolist()
        tokens, lengths = batch["tokens"], batch.response_lengths.tolist()
        responses = [tokens[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]
        return list(self.tokenizer.batch_decode(responses, skip_special_tokens=True))

    def _score_one(self, batch: Batch, at: int, text: str) -> float:
        payload = batch["payload"][at]
        try:
            value = self.function(text, payload.get("answer"), payload, **self.options)
        except (
            Exception,
            SystemExit,
        ) as error:  # it may be the user's own: whatever it raises, say whose it is and where
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise RunError(f"{self._blame(batch, at)} failed: {reason}{_innermost(error)}") from error
        if not isinstance(value, numbers.Real | np.bool_):
            raise RunError(f"{self._blame(batch, at)} answered {value!r} ({type(value).__name__}), not a number")
        if not abs(value) <= LARGEST:  # NaN neither; advantages are computed in float32
            raise RunError(f"{self._blame(batch, at)} answered {value!r:.40}, not a finite number of float32")
        return float(value)

    def _blame(self, batch: Batch, at: int) -> str:
        return f"the reward function {self.name!r}, given sample {at} of the step (problem {batch['uid'][at]}),"


def _innermost(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""


def accuracy(rewards: torch.Tensor | np.ndarray | Sequence[float]) -> float:
    """The share of samples with a full reward (1.0 or more); NaN of none."""
    values = np.asarray(rewards, dtype=np.float64)
    return float((values >= 1.0).mean()) if values.size else math.nan
