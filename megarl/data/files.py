"""Problems from files: JSON lines and Parquet. Everything wrong with a file is found in one reading, with its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.config.paths import path_fault
from megarl.config.schema import SourceConfig
from megarl.data.problem import BadPrompt, Problem, Reading, checked_prompt, source

PARQUET_ROWS = 4096  # read at a time


@source("jsonl")
def read_jsonl(config: SourceConfig, excluded: frozenset[str] = frozenset()) -> Reading:
    """One JSON object a line; blank lines are passed over; a place is FILE:LINE."""
    path, faults = _file(config)
    if path is None:
        return Reading(faults=faults)
    return _collect(config, _json_rows(path), excluded)


@source("parquet")
def read_parquet(config: SourceConfig, excluded: frozenset[str] = frozenset()) -> Reading:
    """One problem a row; a place is FILE:ROW, the first row being 1. Needs pyarrow."""
    path, faults = _file(config)
    if path is None:
        return Reading(faults=faults)
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        return Reading(faults=["reading parquet files needs pyarrow: pip install pyarrow"])
    try:
        with parquet.ParquetFile(path) as file:
            missing = [
                key for key in (config.prompt_key, config.answer_key) if key and key not in file.schema_arrow.names
            ]
            if missing:
                names = ", ".join(file.schema_arrow.names)
                return Reading(faults=[f"{path}: no column {key!r}; its columns are: {names}" for key in missing])
            return _collect(config, _parquet_rows(path, file), excluded)
    except (arrow.ArrowException, OSError) as error:
        return Reading(faults=[f"{path}: not a readable parquet file: {_one_line(error)}"])


def _file(config: SourceConfig) -> tuple[Path | None, list[str]]:
    if not config.path:
        return None, [f"a {config.kind} source needs `path`"]
    if fault := path_fault(config.path):
        return None, [f"path={config.path[:60]!r} {fault}"]
    path = Path(config.path).expanduser()
    if path.is_dir():
        return None, [f"{path}: is a folder, not a {config.kind} file"]
    if not path.exists():
        return None, [f"{path}: no such file"]
    return path, []


# A row is (number, place, object), or (number, place, what is wrong with it).
Row = tuple[int, str, "dict[str, Any] | str"]


def _json_rows(path: Path) -> Iterator[Row]:
    try:
        with open(path, "rb") as file:  # bytes: a line that is not UTF-8 must cost its own place, not the whole file
            for number, line in enumerate(file, 1):
                place = f"{path}:{number}"
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                    if text.strip():
                        row = json.loads(text)
                        if "\\u" in text:  # JSON can write half of a character, which no tokenizer takes
                            json.dumps(row, ensure_ascii=False).encode()
                        yield number, place, row if isinstance(row, dict) else "not a JSON object"
                except UnicodeEncodeError as error:
                    yield number, place, f"{error.object[error.start]!a} is half of a character"
                except UnicodeDecodeError as error:
                    yield number, place, f"not UTF-8 (byte {error.start + 1} of the line)"
                except json.JSONDecodeError as error:
                    yield number, place, f"malformed JSON, column {error.colno}: {error.msg}"
                except (RecursionError, ValueError) as error:  # nested too deep; a number of too many digits
                    yield number, place, f"malformed JSON: {_one_line(error)}"
    except OSError as error:
        yield 0, str(path), f"cannot be read: {error.strerror}"


def _parquet_rows(path: Path, file: Any) -> Iterator[Row]:
    number = 0
    for records in file.iter_batches(batch_size=PARQUET_ROWS):
        for row in records.to_pylist():
            number += 1
            yield number, f"{path}:{number}", row


def _collect(config: SourceConfig, rows: Iterator[Row], excluded: frozenset[str]) -> Reading:
    reading = Reading()
    left_out = 0
    for number, place, row in rows:
        if config.size is not None and len(reading.problems) >= config.size:
            break
        if isinstance(row, str):
            reading.faults.append(f"{place}: {row}")
            continue
        problem = _problem(config, number, place, row, reading.faults)
        if problem is not None and problem.key in excluded:
            left_out += 1
        elif problem is not None:
            reading.problems.append(problem)
    if left_out:
        reading.notes.append(f"{left_out} problems that are held out for evaluation left out of {config.path}")
    if config.size is not None and len(reading.problems) < config.size:
        reading.notes.append(f"{config.path} has only {len(reading.problems)} problems, of {config.size} asked for")
    return reading


def _problem(config: SourceConfig, number: int, place: str, row: dict[str, Any], faults: list[str]) -> Problem | None:
    """The row's problem; None where it has faults, which are added to the list."""
    before = len(faults)
    for key in (config.prompt_key, config.answer_key):
        if key and row.get(key) is None:
            held = ", ".join(name for name in row if row[name] is not None) or "nothing"
            faults.append(f"{place}: no key {key!r}; the row has: {held}")
    if len(faults) > before:
        return None
    try:
        prompt = checked_prompt(row[config.prompt_key])
    except BadPrompt as error:
        faults.append(f"{place}: the prompt (key {config.prompt_key!r}) {error}")
        return None
    answer = row[config.answer_key] if config.answer_key else None
    payload = {key: value for key, value in row.items() if key not in (config.prompt_key, config.answer_key)}
    return Problem(number, place, prompt, answer, payload)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
