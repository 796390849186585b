"""What all tests share: the table of invariants."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import table

_ROWS = pytest.StashKey[list[table.Row]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--json", metavar="FILE", help="write the table of invariants there: a list of {name, value, goal, met}"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = []


@pytest.fixture(scope="session")
def record_invariant(pytestconfig: pytest.Config) -> Callable[[str, float, float], None]:
    """`record_invariant(name, value, goal)`: fails unless value <= goal, and puts the row in the table either way."""

    def record(name: str, value: float, goal: float) -> None:
        row = table.at_most(name, value, goal)
        pytestconfig.stash[_ROWS].append(row)
        assert row.met, f"{name}: {row.value:.3g} is not at most {row.goal:.3g}"

    return record


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[_ROWS]
    if rows:
        terminalreporter.section("invariants")
        terminalreporter.write_line(table.text(rows, "<="))
    if path := config.getoption("--json"):
        table.write_json(path, rows)
        terminalreporter.write_line(f"{len(rows)} invariants written to {path}")
