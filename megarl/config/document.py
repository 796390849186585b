"""Writes docs/configuration.md from the schema: `python -m megarl.config.document > docs/configuration.md`.

The meaning of a setting is the comment beside it in schema.py, so that it is written once and cannot fall behind.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf

from megarl.config import schema
from megarl.config.checks import RANGES, Interval
from megarl.config.loading import describe, section_of

INTRODUCTION = """\
# Configuration

<!-- Written by `python -m megarl.config.document` from megarl/config/schema.py: change it there. -->

A run is described by one YAML file: `megarl train FILE [KEY=VALUE ...]`.

- `base: FILE` (or a list of files), relative to the file it stands in, builds on other files: later ones win over
  earlier ones, and the file wins over its bases. Sections are merged key by key.
- `KEY=VALUE` on the command line wins over all files: `rollout.n=4 actor.optimizer.lr=2e-5 data.eval=null`. Values are
  YAML; text with special characters needs two kinds of quotes: `data.suffix='"Answer: "'`.
- `${rollout.n}` in a value stands for another setting.
- Relative paths, apart from `base`, are relative to the folder in which the command runs.
- An unknown key, a wrong type or settings that contradict each other, the model or the data stop the command before
  anything is started, with exit code 2 and every problem listed at once.
- The run folder's `config.yaml` holds the result with every setting written out; `megarl train` takes it again.
"""


def markdown() -> str:
    """The whole page."""
    sections = [section for name, kind in get_type_hints(schema.Config).items() for section in _sections(name, kind)]
    return "\n".join([INTRODUCTION, *sections])


def comments() -> dict[str, dict[str, str]]:
    """The comment beside each field, by the name of its class."""
    source = inspect.getsource(schema)
    lines = source.splitlines()
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                item.target.id: lines[(item.end_lineno or 1) - 1][item.end_col_offset or 0 :].strip(" #")
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
    return found


def _sections(name: str, kind: Any, given: Mapping[str, Any] | None = None) -> Iterator[str]:
    """A table for a section, then those of the sections within it. `given`: defaults that the section above sets for it."""
    section = section_of(kind)
    assert section is not None
    hints = get_type_hints(section)
    own = OmegaConf.to_container(OmegaConf.structured(section))
    assert isinstance(own, dict)
    defaults = {**own, **(given or {})}
    plain = {key: hint for key, hint in hints.items() if section_of(hint) is None}
    notes = comments()[section.__name__]
    if plain:
        rows = [_row(f"{name}.{key}", hint, _default(defaults[key]), notes[key]) for key, hint in plain.items()]
        head = ["| key | value | default | meaning |", "|---|---|---|---|"]
        yield "\n".join([f"## {name}", "", *_heading(kind), *head, *rows, ""])
    for key, hint in hints.items():
        if key not in plain:
            yield from _sections(f"{name}.{key}", hint, defaults[key])


def _heading(kind: Any) -> list[str]:
    return ["Optional: without it (`null`) there is none.", ""] if type(None) in get_args(kind) else []


def _row(key: str, hint: Any, default: str, meaning: str) -> str:
    value = describe(hint)
    if key in RANGES:
        value = value.replace("number", f"number {Interval.parse(RANGES[key])},", 1).removesuffix(",")
    for ours, yaml in (("None", "null"), ("True", "true"), ("False", "false")):
        meaning = re.sub(rf"\b{ours}\b", yaml, meaning)
    cells = (f"`{key}`", value, default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(value: Any) -> str:
    if value == "???":
        return "must be given"
    if value in ("", {}):
        return "empty"
    shown = OmegaConf.to_yaml(OmegaConf.create([value])).strip().removeprefix("- ")
    return f"`{shown}`"


if __name__ == "__main__":
    sys.stdout.write(markdown())
