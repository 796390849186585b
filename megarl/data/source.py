"""Prompts in a reproducible order, without end, resumable; and the evaluation set, which shares no problem with training."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megarl.batch.sample import Prompt
from megarl.config.schema import DataConfig, SourceConfig
from megarl.data.problem import SOURCES, Problem, Reading, nearest
from megarl.data.template import PromptTemplate
from megarl.errors import ConfigError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENCODED_AT_ONCE = 1000


class PromptSource:
    """Problems as prompts. Every epoch gives each problem once, in an order that follows from (seed, epoch) alone.

    `notes` says what a person should know: how many problems were dropped, and why.
    """

    def __init__(
        self, problems: Sequence[Problem], template: PromptTemplate, *, split: str, seed: int = 0, shuffle: bool = True
    ):
        if not problems:
            raise UserError(f"the {split} set is empty")
        self.problems = list(problems)
        self.template = template
        self.split = split
        self.seed = seed
        self.shuffle = shuffle
        self.notes: list[str] = []
        self.epoch = 0
        self.position = 0  # problems of this epoch already given
        self._order = self._epoch_order()

    def __len__(self) -> int:
        return len(self.problems)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; goes on into the next epoch where this one ends."""
        chosen: list[Problem] = []
        while len(chosen) < count:
            if self.position == len(self._order):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._epoch_order()
            step = min(count - len(chosen), len(self._order) - self.position)
            chosen += [self.problems[at] for at in self._order[self.position : self.position + step]]
            self.position += step
        return self._prompts(chosen)

    def all(self) -> list[Prompt]:
        """Every prompt once, in the source's own order; the position stays where it is."""
        return self._prompts(self.problems)

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands; small, plain values."""
        return {"epoch": self.epoch, "position": self.position, "identity": self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. UserError if the problems or their order are not those the state was taken from."""
        if state["identity"] != self._identity():
            raise UserError(
                f"cannot resume in the {self.split} set: its problems, the seed or the shuffling are not those of the "
                "interrupted run; give the same data settings"
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self.problems)))
        if self.shuffle:
            random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        return order

    def _identity(self) -> str:
        digest = hashlib.sha256(f"{self.seed}/{self.shuffle}".encode())
        for problem in self.problems:
            digest.update(f"\0{problem.index}\0{problem.key}".encode())
        return digest.hexdigest()[:16]

    def _prompts(self, problems: Sequence[Problem]) -> list[Prompt]:
        encoded = self.template.encode(problems)
        prompts = []
        for problem, token_ids in zip(problems, encoded, strict=True):
            text = self.template.text(problem)
            # Text and answer also go into the payload: the samples made from a prompt carry it to rewards and logs.
            payload = {**problem.payload, "prompt": text, "answer": problem.answer}
            prompts.append(Prompt(f"{self.split}-{problem.index}", token_ids, text, problem.answer, payload))
        return prompts


@dataclass
class Sources:
    """The prompts of a run. `notes`: what a person should know about both."""

    train: PromptSource
    eval: PromptSource | None
    notes: list[str] = field(default_factory=list)


def build(config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int) -> Sources:
    """Read, check and order everything. ConfigError lists all faults of both sources at once.

    The evaluation set is read first and its problems are taken out of the training set, whatever the two sources are.
    """
    train, held_out, faults = _read(config)
    if faults:
        raise ConfigError(faults)
    template = PromptTemplate(tokenizer, config.system, config.suffix)
    notes = []
    if not template.chat:
        notes.append("the tokenizer has no chat template: prompts are plain text")
    made: dict[str, PromptSource] = {}
    for split, reading in (("train", train), ("eval", held_out)):
        if reading is None:
            continue
        fitting, dropped = _fitting(reading.problems, template, config, split)
        if not fitting:
            limit = f"data.max_prompt_tokens={config.max_prompt_tokens}"
            raise UserError(f"data.{split}: all {len(dropped)} prompts are longer than {limit}")
        shuffle = config.shuffle and split == "train"
        made[split] = PromptSource(fitting, template, split=split, seed=seed, shuffle=shuffle)
        made[split].notes = reading.notes + _dropped_note(dropped, len(reading.problems), config)
        notes += [f"{split}: {note}" for note in made[split].notes]
    return Sources(made["train"], made.get("eval"), notes)


def check_data(config: DataConfig) -> list[str]:
    """Everything wrong with the data that can be seen without a tokenizer: [] if nothing. Reads the files whole."""
    return _read(config)[2]


def check_source(config: SourceConfig, key: str = "data.train") -> list[str]:
    """Everything wrong with one source: [] if nothing. `key` is its place in the configuration."""
    return _read_one(config, key, frozenset())[1]


def _read(config: DataConfig) -> tuple[Reading, Reading | None, list[str]]:
    """Both sources, the evaluation set's problems out of the training set, and all faults."""
    faults = []
    if config.too_long not in ("drop", "error"):
        faults.append(f"data.too_long is {config.too_long!r}{nearest(config.too_long, ['drop', 'error'])}")
    if config.max_prompt_tokens < 1:
        faults.append(f"data.max_prompt_tokens must be at least 1, not {config.max_prompt_tokens}")
    held_out: Reading | None = None
    if config.eval is not None:
        held_out, eval_faults = _read_one(config.eval, "data.eval", frozenset())
        faults += eval_faults
    excluded = frozenset(problem.key for problem in held_out.problems) if held_out else frozenset()
    train, train_faults = _read_one(config.train, "data.train", excluded)
    return train, held_out, faults + train_faults


def _read_one(config: SourceConfig, key: str, excluded: frozenset[str]) -> tuple[Reading, list[str]]:
    if config.kind not in SOURCES:
        return Reading(), [f"{key}.kind is {config.kind!r}{nearest(config.kind, list(SOURCES))}"]
    if config.size is not None and config.size < 1:
        return Reading(), [f"{key}.size must be at least 1, not {config.size}"]
    reading = SOURCES[config.kind](config, excluded)
    faults = [f"{key}: {fault}" for fault in reading.shown_faults()]
    what = config.path or config.task or config.kind
    if not faults and not reading.problems:
        faults = [
            f"{key}: {what} has no problem that is not also in data.eval: make the evaluation set smaller"
            if excluded
            else f"{key}: {what} is empty"
        ]
    return reading, faults


def _fitting(
    problems: list[Problem], template: PromptTemplate, config: DataConfig, split: str
) -> tuple[list[Problem], list[tuple[Problem, int]]]:
    """The problems whose prompts are short enough, and the others with their lengths in tokens."""
    fitting: list[Problem] = []
    too_long: list[tuple[Problem, int]] = []
    for start in range(0, len(problems), ENCODED_AT_ONCE):
        chunk = problems[start : start + ENCODED_AT_ONCE]
        for problem, token_ids in zip(chunk, template.encode(chunk), strict=True):
            if not token_ids:
                raise UserError(f"data.{split}: {problem.where}: the prompt has no tokens")
            if len(token_ids) <= config.max_prompt_tokens:
                fitting.append(problem)
            else:
                too_long.append((problem, len(token_ids)))
    if too_long and config.too_long == "error":
        named = ", ".join(f"{problem.where} ({length})" for problem, length in too_long[:5])
        more = f" and {len(too_long) - 5} more" if len(too_long) > 5 else ""
        raise UserError(
            f"data.{split}: {len(too_long)} of {len(problems)} prompts are longer than data.max_prompt_tokens="
            f"{config.max_prompt_tokens}: {named}{more}; raise the limit, or set data.too_long=drop"
        )
    return fitting, too_long


def _dropped_note(dropped: list[tuple[Problem, int]], total: int, config: DataConfig) -> list[str]:
    if not dropped:
        return []
    longest, length = max(dropped, key=lambda pair: pair[1])
    limit = f"longer than {config.max_prompt_tokens} tokens"
    return [f"{len(dropped)} of {total} prompts dropped: {limit} (the longest, {longest.where}: {length})"]
