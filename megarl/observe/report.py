"""Reads a run folder back and says what came of the run. The final table, the summary and the tests use the same numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megarl.errors import UserError

FIRST, LAST = 3, 10  # steps whose mean stands for the start and for the end of a run


@dataclass
class Report:
    """A run as it was written. In `metrics` every list has one entry a step; NaN where a step did not say."""

    folder: Path
    metrics: dict[str, list[float]]
    samples: list[dict[str, Any]]
    versions: dict[str, Any]
    config: str

    @property
    def steps(self) -> list[int]:
        return [int(step) for step in self.metrics.get("step", [])]

    def summary(self) -> dict[str, Any]:
        """See `summarise`."""
        return summarise(self.metrics)


def load(folder: str | Path) -> Report:
    """Read a run folder, one of a killed run too: a last line that was cut short is left out. UserError if it is none."""
    folder = Path(folder)
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{folder}: not a run folder (it has no metrics.jsonl)")
    versions, config = folder / "versions.json", folder / "config.yaml"
    return Report(
        folder,
        columns(read_lines(folder / "metrics.jsonl")),
        read_lines(folder / "samples.jsonl") if (folder / "samples.jsonl").exists() else [],
        json.loads(versions.read_text()) if versions.exists() else {},
        config.read_text() if config.exists() else "",
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file. A last line without its end was cut short by a kill and is not read."""
    with open(path, "rb") as file:
        lines = file.read().split(b"\n")[:-1]
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise UserError(f"{path}:{number}: malformed JSON: {error}") from error
    return found


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Lists of numbers, one entry a step, in the order of the steps. Lines of one step are one: the later value counts."""
    steps: dict[int, dict[str, float]] = {}
    names: dict[str, None] = {"step": None}
    for row in rows:
        numbers = {name: _number(value) for name, value in row.items()}
        names |= dict.fromkeys(numbers)
        steps.setdefault(int(row["step"]), {}).update(numbers)
    return {name: [steps[step].get(name, math.nan) for step in sorted(steps)] for name in names}


def _number(value: Any) -> float:
    try:
        return float(value)  # "NaN", "Infinity" and "-Infinity" too
    except (TypeError, ValueError):
        return math.nan


def best_run(values: Sequence[float], length: int = LAST) -> float:
    """The highest mean of `length` values in a row (of all of them where there are fewer); NaN of none."""
    if not values:
        return math.nan
    length = min(length, len(values))
    return max(fmean(values[start : start + length]) for start in range(len(values) - length + 1))


def summarise(metrics: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The result of a run in numbers; None where nothing was measured.

    training_accuracy: means over the first three, the last ten and the best ten steps in a row; greedy_accuracy: of the
    first and of the last evaluation; seconds: of a step (mean, median, the whole) and by stage (mean a step, share).
    """
    greedy = _said(metrics.get("eval/accuracy", []))
    # An evaluation before the first step has a line of its own, whose seconds are no step's.
    steps = [at for at, value in enumerate(metrics.get("reward/accuracy", [])) if not math.isnan(value)]
    said = {name: _said([values[at] for at in steps]) for name, values in metrics.items()}
    training = said.get("reward/accuracy", [])
    seconds = said.get("time/step", [])
    stages = {
        name.removeprefix("time/"): sum(values)
        for name, values in said.items()
        if name.startswith("time/") and name not in ("time/step", "time/evaluate") and values
    }
    whole = sum(seconds)
    return {
        "steps": len(training),
        "training_accuracy": {
            "first": _mean(training[:FIRST]),
            "last": _mean(training[-LAST:]),
            "best": _none_if_nan(best_run(training)),
            "first_steps": min(FIRST, len(training)),
            "last_steps": min(LAST, len(training)),
        },
        "greedy_accuracy": {
            "before": greedy[0] if greedy else None,
            "after": greedy[-1] if len(greedy) > 1 else None,
            "gain": greedy[-1] - greedy[0] if len(greedy) > 1 else None,
        },
        "reward": {
            "first": _mean(said.get("reward/mean", [])[:FIRST]),
            "last": _mean(said.get("reward/mean", [])[-LAST:]),
        },
        "seconds": {
            "step_mean": _mean(seconds),
            "step_median": median(seconds) if seconds else None,
            "whole": whole if seconds else None,
            "by_stage": {name: total / len(seconds) for name, total in stages.items()} if seconds else {},
            "share": {name: total / whole for name, total in stages.items()} if whole > 0 else {},
        },
        "tokens_per_second": _mean(said.get("throughput/tokens_per_second", [])),
        "samples_per_second": _mean(said.get("throughput/samples_per_second", [])),
        "mismatch": {
            "abs_mean": _mean(said.get("mismatch/abs_mean", [])),
            "abs_max": max(said.get("mismatch/abs_max", []), default=None),
        },
        "reshards_verified": _all_verified(said.get("reshard/verified", [])),
    }


def _said(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def _all_verified(values: Sequence[float]) -> bool | None:
    return all(value > 0 for value in values) if values else None
