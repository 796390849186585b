"""A recorded rollout: one JSON object a line, {"step": k, "sample": {...}}. Floats survive exactly (shortest round-trip form)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from megarl.batch import Sample
from megarl.errors import UserError
from megarl.observe.files import Appender, cut_after, writing

_NAMES = frozenset(field.name for field in fields(Sample))


class Recorder:
    """Appends every step's samples to a file, made anew, or keeping what it holds of steps up to `steps`."""

    def __init__(self, path: Path, steps: int = 0):
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        cut_after(path, steps)
        self._file = Appender(path)

    def add(self, step: int, samples: Sequence[Sample]) -> None:
        """Samples of one step, in one write. RunError if they cannot be written."""
        lines = (json.dumps({"step": step, "sample": asdict(sample)}) + "\n" for sample in samples)
        self._file.write("".join(lines).encode())

    def close(self) -> None:
        self._file.close()


def read_steps(path: Path) -> Iterator[list[Sample]]:
    """The samples of each recorded step, in order. Raises UserError naming the file and line that cannot be read."""

    def lines() -> Iterator[tuple[int, Sample]]:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line)
                    pair = int(record["step"]), _sample(record["sample"])
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise UserError(f"{path}:{number}: not a recorded sample ({error})") from error
                yield pair

    for _, group in groupby(lines(), key=lambda pair: pair[0]):
        yield [sample for _, sample in group]


def check_recording(path: Path, *, steps: int, parts: int, ranks: int, vocabulary: int, context: int) -> list[str]:
    """What keeps a run of `steps` steps from replaying a file: [] if nothing, else the first thing, with its step.

    A step's samples must divide into `parts` mini-batches with one sample or more for each of `ranks` data-parallel ranks.
    """
    number = 0
    try:
        for number, samples in enumerate(islice(read_steps(path), steps), start=1):
            count = len(samples)
            if count % parts or count // parts < ranks:
                needed = f"algorithm.mini_batches={parts} with a sample for each of {ranks} data-parallel ranks"
                return [f"step {number} has {count} samples, which do not divide into {needed}"]
            largest = max(max(chain(sample.prompt_ids, sample.response_ids)) for sample in samples)
            if largest >= vocabulary:
                return [
                    f"step {number} has the token {largest}, and the model {vocabulary} tokens: it is of another model"
                ]
            longest = max(len(sample.prompt_ids) + len(sample.response_ids) for sample in samples)
            if longest > context:
                return [f"step {number} has a sequence of {longest} tokens, and the model was made for {context}"]
    except UserError as error:
        return [str(error)]
    except OSError as error:
        return [f"it cannot be read: {error.strerror}"]
    if number < steps:
        return [f"it holds {number} steps, and run.steps={steps}; record a longer run or set run.steps to that"]
    return []


def _sample(values: dict[str, Any]) -> Sample:
    """A recorded sample, checked: what is wrong in it would be a wrong number, or a crash in another process."""
    sample = Sample(**{key: value for key, value in values.items() if key in _NAMES})
    sample.check()
    if not sample.prompt_ids:
        raise ValueError("the prompt has no tokens")
    if not all(type(token) is int and token >= 0 for token in chain(sample.prompt_ids, sample.response_ids)):
        raise ValueError("a token id is not a whole number from 0 on")
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in sample.rollout_log_probs):
        raise ValueError("a log-prob is not a finite number")
    if not all(value in (0, 1) for value in sample.loss_mask):
        raise ValueError("loss_mask holds something beside 0 and 1")
    if not isinstance(sample.payload, dict):
        raise ValueError("payload is not an object")
    return sample
