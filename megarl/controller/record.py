"""A recorded rollout: one JSON object a line, {"step": k, "sample": {...}}. Floats survive exactly (shortest round-trip form)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path

from megarl.batch import Sample
from megarl.errors import UserError
from megarl.observe.files import Appender, writing


class Recorder:
    """Appends every step's samples to a file, made anew."""

    def __init__(self, path: Path):
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file():
                path.unlink()
        self._file = Appender(path)

    def add(self, step: int, samples: Sequence[Sample]) -> None:
        """Samples of one step, in one write. RunError if they cannot be written."""
        lines = (json.dumps({"step": step, "sample": asdict(sample)}) + "\n" for sample in samples)
        self._file.write("".join(lines).encode())

    def close(self) -> None:
        self._file.close()


def read_steps(path: Path) -> Iterator[list[Sample]]:
    """The samples of each recorded step, in order. Raises UserError naming the file and line that cannot be read."""
    names = {f.name for f in fields(Sample)}

    def lines() -> Iterator[tuple[int, Sample]]:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    record = json.loads(line)
                    yield int(record["step"]), Sample(**{k: v for k, v in record["sample"].items() if k in names})
                except (ValueError, KeyError, TypeError) as error:
                    raise UserError(f"{path}:{number}: not a recorded sample ({error})") from error

    for _, group in groupby(lines(), key=lambda pair: pair[0]):
        yield [sample for _, sample in group]
