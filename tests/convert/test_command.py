"""The command line of conversions: variables of torchrun, output that nobody reads any more."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from megarl import cli
from megarl.convert import command, progress
from megarl.convert.hf_to_megatron import hf_to_megatron
from megarl.convert.megatron_to_hf import megatron_to_hf
from megarl.convert.verify import verify
from megarl.convert.work import Options
from megarl.models.heads import make_tiny_trl

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


@pytest.mark.parametrize(
    ("option", "hinted"),
    [
        ("--tp", True),
        ("--target-tensor-parallel-size", True),
        ("--pipeline-model-parallel-size=2", True),
        ("--target-ep", True),
        ("--stop", False),
        ("--step", False),
    ],
)
def test_who_gives_a_layout_is_told_that_there_is_none(
    option: str, hinted: bool, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for direction in ("hf-to-megatron", "megatron-to-hf"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["convert", direction, str(hf), str(tmp_path / "target"), option])
        assert ended.value.code == 2
        hint = f" ({command.NO_LAYOUT})" if hinted else ""
        assert capsys.readouterr().err.endswith(f"megarl: error: unrecognized arguments: {option}{hint}\n")


def test_a_target_in_whose_place_no_folder_can_be_put_is_told_at_once(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "mounted"
    place.mkdir()
    system = ctypes.CDLL(None, use_errno=True)
    if system.mount(b"none", bytes(place), b"tmpfs", 0, None):
        pytest.skip(f"mount: {os.strerror(ctypes.get_errno())}")
    try:
        assert cli.main(["convert", "hf-to-megatron", str(hf), str(place), "--quiet"]) == 2
    finally:
        system.umount(bytes(place))
    assert f"{place} is a mount point, in whose place no folder can be put" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [place]


def test_with_sync_the_name_is_on_the_disk_too(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[str, bool]] = []
    fsync = os.fsync

    def noted(file: int) -> None:
        waited.append((os.readlink(f"/proc/self/fd/{file}"), (tmp_path / "target").exists()))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    hf_to_megatron(hf, tmp_path / "target", Options(durable=True), show=False)
    assert waited[-1] == (str(tmp_path), True)
    assert not any(named for _, named in waited[:-1])  # all else before


def test_an_output_layer_that_a_head_replaces_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_tiny_trl("qwen2-untied", tmp_path / "hf", prefix="pretrained_model.")
    assert cli.main(["convert", "hf-to-megatron", str(source), str(tmp_path / "megatron")]) == 0
    note = f"pretrained_model.lm_head.weight of {source} is left out: a score head stands in its place"
    assert f"note: {note}\n" in capsys.readouterr().err
    back = megatron_to_hf(tmp_path / "megatron", tmp_path / "back", show=False)
    assert note in verify(source, back, show=False).notes


@pytest.mark.parametrize("closed", [True, False])
def test_what_stderr_does_not_take_is_no_reason_to_stop(
    closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Notes and progress."""
    source = make_tiny_trl("qwen2-untied", tmp_path / "hf", prefix="pretrained_model.")
    monkeypatch.setattr(progress, "STAYS", 0.0)
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", None if closed else full)
        assert cli.main(["convert", "hf-to-megatron", str(source), str(tmp_path / "megatron")]) == 0
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert capfd.readouterr() == (f"{tmp_path / 'megatron'}\n", "")
