"""docs/configuration.md says what the schema says."""

from __future__ import annotations

from pathlib import Path

from megarl.config.document import comments, markdown
from megarl.config.loading import keys, section_of
from megarl.config.schema import Config

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_committed_page_is_current() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == markdown(), "run: python -m megarl.config.document > docs/configuration.md"


def test_every_setting_is_on_the_page_with_a_meaning() -> None:
    rows = {line.split("`")[1]: line for line in markdown().splitlines() if line.startswith("| `")}
    assert set(rows) == {".".join(path) for path, _ in keys()}
    assert [key for key, row in rows.items() if row.rstrip(" |").endswith("`") or "|  |" in row] == []


def test_comments_are_read_beside_their_fields() -> None:
    found = comments()
    assert found["RunConfig"]["steps"] == "optimisation steps"
    assert {name for name, _ in ((kind.__name__, kind) for kind in _sections(Config))} <= set(found)


def _sections(kind: type) -> list[type]:
    from typing import get_type_hints

    inner = [section for hint in get_type_hints(kind).values() if (section := section_of(hint))]
    return [kind, *(deep for section in inner for deep in _sections(section))]


def test_defaults_are_those_that_the_section_above_sets() -> None:
    rows = {line.split("`")[1]: line for line in markdown().splitlines() if line.startswith("| `")}
    assert "`1.0e-06`" in rows["actor.optimizer.lr"] and "`1.0e-05`" in rows["critic.optimizer.lr"]
