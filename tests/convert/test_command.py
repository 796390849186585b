"""The command line of conversions: variables of torchrun, output that nobody reads any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl import cli

WRONG = {
    "no rank": ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK and MASTER_ADDR and MASTER_PORT are not set"),
    "no address": (
        {"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1234"},
        "WORLD_SIZE is 2, but MASTER_ADDR is not set",
    ),
    "no number": ({"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x', not a number of at least 1"),
    "no process": ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', not a number of at least 1"),
    "a rank too many": (
        {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"},
        "RANK is 2, of a WORLD_SIZE of 2",
    ),
    "no port": (
        {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"},
        "MASTER_PORT is 'http', not a number of at least 0",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_variables_of_torchrun_that_are_wrong_are_one_sentence(
    what: str, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables, words = WRONG[what]
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["convert", "hf-to-megatron", str(hf), str(tmp_path / "target"), "--quiet"]) == 2
    end = "start several processes with torchrun, or unset WORLD_SIZE for one."
    assert capsys.readouterr().err == f"megarl: {words}: {end}\n"
    assert list(tmp_path.iterdir()) == []
