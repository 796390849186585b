"""Scores what was sampled."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
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
WHOLE = ""  # the name of the only part of a reward that is one number
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

        Where the function answers named parts, the reward is their sum, and there is also reward_parts (SAMPLE, float32, (N, K)),
        with the K names in the meta under the same name. RunError names the sample and the function where the function raises, or
        answers anything but finite numbers.
        """
        texts = self.texts(batch)
        answers = [self._score_one(batch, at, text) for at, text in enumerate(texts)]
        objects = np.empty(len(texts), dtype=object)
        objects[:] = texts
        scored = batch.select([]).set("response_text", objects, Level.SAMPLE)
        names = tuple(answers[0]) if answers else (WHOLE,)
        for at, answer in enumerate(answers):
            if tuple(answer) != names:
                raise RunError(
                    f"{self._blame(batch, at)} answered {_named(tuple(answer))}, and for sample 0 it answered {_named(names)}"
                )
        parts = torch.tensor([list(answer.values()) for answer in answers], dtype=torch.float32).view(-1, len(names))
        scored = scored.set("reward", parts.sum(dim=1), Level.SAMPLE)
        if names == (WHOLE,):
            return scored
        scored = scored.set("reward_parts", parts, Level.SAMPLE)
        scored.meta["reward_parts"] = list(names)
        return scored

    def texts(self, batch: Batch) -> list[str]:
        """Every response as text, without special tokens."""
        if not len(batch):  # the tokenizer would decode an empty list to one empty text
            return []
        ends = torch.cumsum(batch.total_lengths, 0).tolist()
        tokens, lengths = batch["tokens"], batch.response_lengths.tolist()
        responses = [tokens[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]
        return list(self.tokenizer.batch_decode(responses, skip_special_tokens=True))

    def _score_one(self, batch: Batch, at: int, text: str) -> dict[str, float]:
        """The named parts of a reward, in the order of their names; one without a name where there are no parts."""
        payload = batch["payload"][at]
        try:
            value = self.function(text, payload.get("answer"), payload, **self.options)
        except (
            Exception,
            SystemExit,
        ) as error:  # it may be the user's own: whatever it raises, say whose it is and where
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise RunError(f"{self._blame(batch, at)} failed: {reason}{_innermost(error)}") from error
        parts = value if isinstance(value, Mapping) else {WHOLE: value}
        if not parts or not all(isinstance(name, str) for name in parts):
            raise RunError(f"{self._blame(batch, at)} answered {value!r:.60}: its parts must have names")
        for name, part in parts.items():
            what = f"{part!r:.40}" if name == WHOLE else f"{part!r:.40} as its part {name!r}"
            if not isinstance(part, numbers.Real | np.bool_):
                raise RunError(f"{self._blame(batch, at)} answered {what} ({type(part).__name__}), not a number")
            if not abs(part) <= LARGEST:  # NaN neither; advantages are computed in float32
                raise RunError(f"{self._blame(batch, at)} answered {what}, not a finite number of float32")
        if not abs(sum(map(float, parts.values()))) <= LARGEST:
            raise RunError(f"{self._blame(batch, at)} answered parts whose sum is not a finite number of float32")
        return {name: float(parts[name]) for name in sorted(parts)}

    def _blame(self, batch: Batch, at: int) -> str:
        return f"the reward function {self.name!r}, given sample {at} of the step (problem {batch['uid'][at]}),"


def _named(names: tuple[str, ...]) -> str:
    return "one number" if names == (WHOLE,) else f"the parts {', '.join(names)}"


def _innermost(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""


def accuracy(rewards: torch.Tensor | np.ndarray | Sequence[float]) -> float:
    """The share of samples with a full reward (1.0 or more); NaN of none."""
    values = np.asarray(rewards, dtype=np.float64)
    return float((values >= 1.0).mean()) if values.size else math.nan
