"""Bad input ends with exit code 2 before Ray is imported, with every problem on a line of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.bad_inputs import CASES

ROOT = Path(__file__).parents[2]


class Results(dict[str, dict[str, Any]]):
    root: Path
    port: int


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("bad")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "tests.cli.run_bad_inputs", str(folder), str(port)],
            cwd=ROOT,
            env=os.environ | {"MEGARL_CACHE": str(folder / "cache")},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    found = Results(json.loads(done.stdout.splitlines()[-1]))
    found.root, found.port = folder, port
    return found


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_told_in_sentences(results: Results, name: str) -> None:
    result = results[name]
    assert result["code"] == 2, result["errors"]
    assert "Traceback" not in result["errors"] and result["out"] == ""
    lines = result["errors"].splitlines()
    # transformers may warn before; the list is what stands after the head line, to the end
    head = next(number for number, line in enumerate(lines) if line.startswith("megarl: "))
    listed = lines[head + 1 :]
    expected = [
        said.replace("{root}", str(results.root)).replace("{port}", str(results.port)) for said in CASES[name].said
    ]
    assert all(line.startswith("  - ") for line in listed)
    for said in expected:
        assert sum(said in line for line in listed) == 1, (said, listed)
    assert len(listed) == len(expected), listed
    assert lines[head].endswith(f"{len(listed)} problem{'s' if len(listed) > 1 else ''}")


def test_nothing_heavy_was_imported(results: Results) -> None:
    assert {name: result["loaded"] for name, result in results.items() if result["loaded"]} == {}


def test_nothing_was_left_behind(results: Results) -> None:
    assert not [path for path in results.root.iterdir() if path.name.startswith(("run-", "runs"))]
