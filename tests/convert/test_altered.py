"""Files that are not what was written: those of a checkpoint of training, by its checksums, and what lies beside the weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl import cli
from megarl.bridge.torch_dist import COMMON, METADATA, DistReader
from megarl.bridge.torch_dist_write import altered, checksum, checksums, write_checksums
from megarl.convert.hf_to_megatron import _ToMegatron
from megarl.convert.job import carry_out
from megarl.convert.megatron_to_hf import megatron_to_hf
from megarl.convert.processes import ALONE
from megarl.convert.source import open_hf
from megarl.convert.verify import compare, verify
from megarl.convert.work import Options
from megarl.errors import UserError
from megarl.models.tiny import make_tiny
from tests.bridge.test_quantised import deepseek, gpt_oss

FIRST = "__0_0.distcp"


@pytest.fixture
def trained(megatron: Path, tmp_path: Path) -> Path:
    """As training leaves it: behind the weights of a file come states of an optimizer, and all have checksums."""
    folder = shutil.copytree(megatron, tmp_path / "trained")
    sums: dict[str, Any] = {name: checksum(folder / name) for name in (METADATA, COMMON)}
    for path in folder.glob("*.distcp"):
        front = path.stat().st_size
        with path.open("ab") as file:
            file.write(bytes(1000))
        whole, of_front = checksums(path, front)
        assert of_front != whole == checksum(path)
        sums[path.name] = (whole, front, of_front)
    write_checksums(folder, sums)
    return folder


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_SET if place >= 0 else os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def said_of(path: Path) -> str:
    return f"{path} is damaged: its checksum is not the one it was written with."


def test_a_weight_that_was_altered_is_told_by_conversion_and_verify(trained: Path, hf: Path, tmp_path: Path) -> None:
    back = megatron_to_hf(trained, tmp_path / "back", show=False)
    assert verify(trained, back, show=False).differences == []
    chunk = DistReader(trained).tensors["decoder.layers.mlp.linear_fc2.weight"].chunks[-1]
    flip(trained / chunk.file, chunk.start + chunk.length // 2)
    for act in (
        lambda: megatron_to_hf(trained, tmp_path / "target", show=False),
        lambda: verify(trained, back, show=False),
        lambda: verify(hf, trained, show=False),
    ):
        with pytest.raises(UserError) as error:
            act()
        assert str(error.value) == said_of(trained / chunk.file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "trained"]


def test_a_conversion_does_not_read_the_optimizer_and_verify_does(trained: Path, tmp_path: Path) -> None:
    flip(trained / FIRST, -1)
    back = megatron_to_hf(trained, tmp_path / "back", show=False)
    with pytest.raises(UserError) as error:
        verify(back, trained, show=False)
    assert str(error.value) == said_of(trained / FIRST)


def test_checksums_of_whole_files_alone_count_too(trained: Path, tmp_path: Path) -> None:
    """As megarl wrote them before it wrote those of the weights."""
    files = [METADATA, COMMON, *(path.name for path in trained.glob("*.distcp"))]
    write_checksums(trained, {name: checksum(trained / name) for name in files})
    megatron_to_hf(trained, tmp_path / "back", show=False)
    flip(trained / FIRST, -1)
    with pytest.raises(UserError, match="its checksum is not the one"):
        megatron_to_hf(trained, tmp_path / "target", show=False)


@pytest.mark.parametrize("text", ["[" * 10, "[]", '{"__0_0.distcp": "x"}', '{"__0_0.distcp": [1, 2]}'])
def test_checksums_that_are_none_are_told(text: str, trained: Path, tmp_path: Path) -> None:
    (trained / "checksums.json").write_text(text)
    with pytest.raises(UserError, match=r"checksums.json cannot be read"):
        megatron_to_hf(trained, tmp_path / "target", show=False)


@pytest.mark.parametrize("name", [FIRST, METADATA])
def test_a_file_that_the_checksums_do_not_name_is_told(name: str, trained: Path, hf: Path, tmp_path: Path) -> None:
    path = trained / "checksums.json"
    named = json.loads(path.read_text())
    del named[name]
    path.write_text(json.dumps(named))
    for act in (
        lambda: megatron_to_hf(trained, tmp_path / "target", show=False),
        lambda: verify(hf, trained, show=False),
    ):
        with pytest.raises(UserError) as error:
            act()
        said = f"{path} does not name {name}, so nothing tells whether that is what was written."
        assert str(error.value) == said
    assert [path.name for path in tmp_path.iterdir()] == ["trained"]


def test_what_is_not_read_need_not_be_named(trained: Path, tmp_path: Path) -> None:
    path = trained / "checksums.json"
    named = json.loads(path.read_text())
    del named[COMMON]
    path.write_text(json.dumps(named))
    megatron_to_hf(trained, tmp_path / "back", show=False)
    assert altered(trained) == f"{path} does not name {COMMON}, so nothing tells whether that is what was written."


NO_FILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a folder": (Path.mkdir, "is no file"),
    "a pipe": (os.mkfifo, "is no file"),
    "a link to nowhere": (lambda path: path.symlink_to("nowhere"), "cannot be read"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "cannot be read"),
}


@pytest.mark.parametrize("what", NO_FILE)
def test_checksums_that_are_no_file_are_told(what: str, trained: Path) -> None:
    make, words = NO_FILE[what]
    path = trained / "checksums.json"
    path.unlink()
    assert altered(trained) is None
    make(path)
    said = altered(trained)
    assert said is not None and said.startswith(f"{path} {words}")


CUT = {  # how a tensor's bytes are taken: as they lie, cast, turned and taken in turns, dequantised, compared with its tie
    "as it lies": (lambda folder: make_tiny("qwen3", folder), Options()),
    "cast": (lambda folder: make_tiny("qwen3", folder), Options(dtype=torch.bfloat16)),
    "of experts in one tensor": (lambda folder: make_tiny("gpt-oss", folder), Options()),
    "mxfp4": (gpt_oss, Options()),
    "fp8": (deepseek, Options()),
}


@pytest.mark.parametrize("what", CUT)
def test_a_source_that_is_cut_short_while_it_is_converted_is_one_sentence(what: str, tmp_path: Path) -> None:
    """Once it is opened and found whole. Of a file that is mapped, not read, it would be the end of the process."""
    make, options = CUT[what]
    source = make(tmp_path / "hf")
    origin = open_hf(source)
    weights = source / "model.safetensors"
    os.truncate(weights, 20_000)
    job = _ToMegatron(origin, options)
    with pytest.raises(UserError, match=r"model.safetensors is (damaged or )?cut short"):
        carry_out(job, tmp_path / "target", ALONE, show=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_a_source_that_is_cut_short_while_it_is_compared_is_one_sentence(hf: Path, tmp_path: Path) -> None:
    source = shutil.copytree(hf, tmp_path / "hf")
    one, other = open_hf(hf), open_hf(source)
    os.truncate(source / "model.safetensors", 20_000)
    with pytest.raises(UserError, match=r"model.safetensors is damaged or cut short"):
        compare(one, other, show=False)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def empty(path: Path) -> None:
    path.write_bytes(b"")


BESIDE = {
    "common.pt zeroed": (COMMON, zero, "{path} is damaged at byte 0: nothing is saved there (File is not a zip file)."),
    "common.pt removed": (COMMON, Path.unlink, "{folder} holds no common.pt, without which Megatron does not load it."),
    "objects zeroed": ("__5_0.distcp", zero, "{path} is damaged at byte 0: nothing is saved there (File is not a zip"),
    "a tokenizer zeroed": ("tokenizer.json", zero, "differs: {path} is damaged: it is no JSON"),
    "a tokenizer emptied": ("tokenizer_config.json", empty, "differs: {path} is damaged: it is no JSON"),
    "a tokenizer removed": ("tokenizer.json", Path.unlink, "differs: {folder} has no tokenizer.json"),
    "a tokenizer altered": (
        "tokenizer.json",
        lambda path: path.write_text(path.read_text().replace('"<', '"(')),
        "differs: tokenizer.json differs",
    ),
    "a generation config altered": (
        "generation_config.json",
        lambda path: path.write_text('{"temperature": 2}'),
        "differs: generation_config.json differs",
    ),
}


@pytest.mark.parametrize("what", BESIDE)
def test_what_lies_beside_the_weights_is_verified(
    what: str, hf: Path, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, spoil, words = BESIDE[what]
    folder = shutil.copytree(megatron, tmp_path / "megatron")
    spoil(folder / name)
    code = cli.main(["convert", "verify", str(hf), str(folder)])
    said = capsys.readouterr()
    assert words.format(folder=folder, path=folder / name) in (said.out if code == 1 else said.err)
    assert code == (1 if words.startswith("differs") else 2) and said.err.count("\n") == code - 1


def test_the_same_json_written_otherwise_and_a_bare_checkpoint_are_no_difference(
    hf: Path, megatron: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(megatron, tmp_path / "megatron")
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("\n", "\n "))
    assert (verify(hf, folder, show=False).differences, verify(hf, folder, show=False).notes) == ([], [])
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).unlink()
    result = verify(hf, folder, show=False)
    assert result.differences == []
    assert result.notes == [f"{folder} has no tokenizer, so there was none to compare"]
