"""Rows of measured values against their goals: printed for a person, written as JSON for a machine.

Every benchmark and every table of invariants ends in one of these. The file is a list of objects {name, value, goal, met}.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple


class Row(NamedTuple):
    """One measured value. `met` is decided where the goal is known; without a goal (None) a row only informs."""

    name: str
    value: float
    goal: float | None
    met: bool


def at_most(name: str, value: float, goal: float) -> Row:
    """A value that must not exceed its goal. NaN never meets one."""
    return Row(name, float(value), float(goal), bool(value <= goal))


def at_least(name: str, value: float, goal: float) -> Row:
    """A value that must reach its goal. NaN never does."""
    return Row(name, float(value), float(goal), bool(value >= goal))


def plain(name: str, value: float) -> Row:
    """A value worth knowing, without a goal."""
    return Row(name, float(value), None, True)


def write_json(path: str | Path, rows: Iterable[Row]) -> None:
    """Write the rows, whole or not at all. JSON knows no NaN and no infinity: they become null."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    text = json.dumps([_object(row) for row in rows], indent=1, allow_nan=False)
    beside.write_text(text + "\n", encoding="utf-8")
    beside.replace(path)


def _object(row: Row) -> dict[str, str | float | bool | None]:
    value: float | None = row.value if math.isfinite(row.value) else None
    return {"name": row.name, "value": value, "goal": row.goal, "met": row.met}


def text(rows: Iterable[Row], relation: Literal["<=", ">=", ""] = "") -> str:
    """The rows as lines of text. `relation` is how values relate to goals where that is the same for all."""
    rows = list(rows)
    wide = max((len(row.name) for row in rows), default=0)
    return "\n".join(f"  {row.name:{wide}}  {row.value:>11.4g}{_goal(row, relation)}" for row in rows)


def _goal(row: Row, relation: str) -> str:
    if row.goal is None:
        return ""
    return f"  {relation or 'goal'} {row.goal:<9.4g}  {'met' if row.met else 'NOT MET'}"
