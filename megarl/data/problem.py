"""A problem as its source gives it, before any tokenizer has seen it, and the registry of sources."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megarl.config.schema import SourceConfig

SHOWN_PROBLEMS = 10  # of one file; a thousand malformed lines usually have one cause


@dataclass(frozen=True)
class Problem:
    """One thing to solve."""

    index: int  # where it stands in its source (line, row, number): the stable half of a prompt's uid
    where: str  # the same for a person: "train.jsonl:17"
    prompt: str | list[dict[str, str]]  # the user's turn, or a whole conversation that ends with it
    answer: Any
    payload: dict[str, Any] = field(default_factory=dict)

    @property
    def user_text(self) -> str:
        """What the last turn says."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]

    @property
    def key(self) -> str:
        """Two problems with one key ask the same: the whole conversation's words, whatever the white space between them."""
        if isinstance(self.prompt, str):
            return " ".join(self.prompt.split())
        return "\n".join(f"{turn['role']}: {' '.join(turn['content'].split())}" for turn in self.prompt)


@dataclass
class Reading:
    """What a source gave: its problems, and everything wrong with it (then nobody should use the problems)."""

    problems: list[Problem] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what a person should know, though nothing is wrong

    def shown_faults(self) -> list[str]:
        """The faults for a person: the first few, and how many more there are."""
        hidden = len(self.faults) - SHOWN_PROBLEMS
        return self.faults[:SHOWN_PROBLEMS] + ([f"… and {hidden} more like these"] if hidden > 0 else [])


# excluded: keys of problems that must not be given (held out for evaluation)
Reader = Callable[[SourceConfig, "frozenset[str]"], Reading]
SOURCES: dict[str, Reader] = {}


def source(kind: str) -> Callable[[Reader], Reader]:
    """Register a reader under `data.train.kind`."""

    def register(reader: Reader) -> Reader:
        SOURCES[kind] = reader
        return reader

    return register


def nearest(name: str, known: list[str]) -> str:
    """A hint for a misspelt name: "; did you mean 'x'?", or the known names when there are few, or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(known))}" if len(known) <= SHOWN_PROBLEMS else ""


class BadPrompt(ValueError):
    """Half a sentence about a prompt that cannot be used; whoever reads the file puts the place before it."""


def checked_prompt(value: Any) -> str | list[dict[str, str]]:
    """A prompt from a file as text or as turns {role, content} that end with what is to be answered.

    Raises BadPrompt with half a sentence that says what is wrong with it.
    """
    if isinstance(value, str):
        if not value.strip():
            raise BadPrompt("is empty")
        return value
    if not isinstance(value, list):
        raise BadPrompt(f"must be text or a list of {{role, content}} messages, not {type(value).__name__}")
    if not value:
        raise BadPrompt("is an empty list of messages")
    turns = []
    for number, turn in enumerate(value, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise BadPrompt(f"has a message without a role (message {number})")
        if not isinstance(turn.get("content"), str):
            raise BadPrompt(f"has a message whose content is not text (message {number})")
        # Parquet gives every struct every field, None where a row has none: such fields were never said.
        turns.append({name: text for name, text in turn.items() if text is not None})
    if turns[-1]["role"] in ("assistant", "system"):
        raise BadPrompt(f"ends with a message of the {turns[-1]['role']}: the last message must be the one to answer")
    return turns
