"""Everything that can be wrong with what is converted: one sentence, nothing half-written, nothing run."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl import cli
from megarl.bridge.hf_io import INDEX
from megarl.bridge.torch_dist import DistReader
from megarl.bridge.torch_dist_write import ChunkFile
from megarl.convert.hf_to_megatron import hf_to_megatron
from megarl.convert.megatron_to_hf import megatron_to_hf
from megarl.convert.processes import Processes
from megarl.convert.unfinished import Unfinished
from megarl.convert.work import Options
from megarl.errors import RunError
from megarl.models.tiny import make_tiny

FIRST = "__0_0.distcp"


def weights(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")


def sharded(folder: Path, change: Callable[[Path], Any]) -> None:
    """In four files with an index, of which something is changed."""
    whole = shutil.move(folder, folder.with_name("whole"))
    checkpoint = hf_to_megatron(whole, folder.with_name("step"), show=False)
    megatron_to_hf(checkpoint, folder, Options(shard_bytes=300_000), show=False)
    change(folder)


def indexed(folder: Path, name: str, file: str = "model-00001-of-00004.safetensors") -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][name] = file
    (folder / INDEX).write_text(json.dumps(index))


def config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


HUGGING_FACE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an extra tensor": (
        lambda f: weights(f, model__surprise=torch.zeros(3)),
        "does not fit its config.json: holds model.surprise, which no rule of qwen3 knows",
    ),
    "a wrong shape": (
        lambda f: weights(f, model__norm__weight=torch.zeros(81)),
        "model.norm.weight has shape (81,), not (80,)",
    ),
    "a missing tensor": (lambda f: weights(f, model__norm__weight=None), "lacks model.norm.weight"),
    "a NaN": (
        lambda f: weights(f, model__norm__weight=torch.full((80,), float("nan"))),
        "model.norm.weight holds 80 elements that are NaN or infinite (of 80); --allow-nonfinite carries them over",
    ),
    "a NaN in what is copied as it lies": (
        lambda f: weights(f, model__embed_tokens__weight=torch.full((419, 80), float("nan"))),
        "model.embed_tokens.weight holds 33520 elements that are NaN or infinite (of 33520); --allow-nonfinite",
    ),
    "a truncated shard": (
        lambda f: cut(f / "model.safetensors", 100),
        "model.safetensors is damaged or cut short",
    ),
    "a missing shard": (
        lambda f: sharded(f, lambda g: (g / "model-00002-of-00004.safetensors").unlink()),
        "model-00002-of-00004.safetensors is missing, though model.safetensors.index.json names it",
    ),
    "a missing shard without an index": (
        lambda f: sharded(f, lambda g: [(g / n).unlink() for n in (INDEX, "model-00002-of-00004.safetensors")]),
        "holds 3 of the 4 shards",
    ),
    "a wrong index": (
        lambda f: sharded(f, partial(indexed, name="model.norm.weight")),
        "disagree about model.norm.weight",
    ),
    "one file beside an index of others": (
        lambda f: sharded(f, lambda g: shutil.copy(f.with_name("whole") / "model.safetensors", g)),
        "holds model.safetensors, which transformers would read, and model.safetensors.index.json, which names other files",
    ),
    "an output layer that is not tied": (
        lambda f: [weights(f, lm_head__weight=torch.zeros(419, 80)), config(f, tie_word_embeddings=True)],
        "lm_head.weight differs from model.embed_tokens.weight, and tie_word_embeddings says that they are one",
    ),
    "only pickles": (only_pickles, "pytorch_model.bin is a pickle, which can run code: give safetensors"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), "holds no config.json"),
    "nothing": (lambda f: shutil.rmtree(f), "There is no model folder"),
    "a million layers": (
        lambda f: config(f, num_hidden_layers=1_000_000),
        "num_hidden_layers = 1000000 is more than any model has: at most 10000 can be mapped",
    ),
    "a number of five thousand digits": (
        lambda f: (f / "config.json").write_text(
            '{"architectures": ["Qwen3ForCausalLM"], "vocab_size": 1%s}' % ("0" * 5000)
        ),
        "config.json cannot be read: Exceeds the limit",
    ),
    "a number that no float holds": (
        lambda f: config(f, rms_norm_eps=10**400),
        "rms_norm_eps = 1000000000000000000000000000000000000... must be a finite number above 0",
    ),
    "brackets a hundred thousand deep": (
        lambda f: (f / "config.json").write_text("[" * 100_000),
        "config.json cannot be read",
    ),
    "a tokenizer that is no file": (
        lambda f: [(f / "tokenizer.json").unlink(), (f / "tokenizer.json").symlink_to("tokenizer.json")],
        "tokenizer.json cannot be read: Too many levels of symbolic links",
    ),
    "a tokenizer that leads nowhere": (
        lambda f: [(f / "tokenizer.json").unlink(), (f / "tokenizer.json").symlink_to(f / "blobs" / "5f3a")],
        "/blobs/5f3a, where nothing is",
    ),
    "a tokenizer that the disk does not give": (
        lambda f: [(f / "tokenizer.json").unlink(), (f / "tokenizer.json").symlink_to("/proc/self/mem")],
        "tokenizer.json cannot be read: Input/output error",
    ),
    "a tokenizer that is a pipe": (
        lambda f: [(f / "tokenizer.json").unlink(), os.mkfifo(f / "tokenizer.json")],
        "tokenizer.json is no file",
    ),
    "weights that lead nowhere": (
        lambda f: [(f / "model.safetensors").unlink(), (f / "model.safetensors").symlink_to("../blobs/5f3a")],
        "model.safetensors is a link to ../blobs/5f3a, where nothing is",
    ),
    "an index that names the folder": (
        lambda f: sharded(f, partial(indexed, name="model.norm.weight", file=".")),
        "weight_map must name a file for every tensor, and '.' for model.norm.weight is a folder",
    ),
    "weights quantised otherwise": (
        lambda f: config(f, quantization_config={"quant_method": "gptq"}),
        "quantised by 'gptq' cannot be read, only by mxfp4 or fp8",
    ),
    "a field that nobody knows": (
        lambda f: config(f, surprise_field=3),
        "the field surprise_field = 3 is not understood",
    ),
    "weights that are a folder": (
        lambda f: [(f / "model.safetensors").unlink(), (f / "model.safetensors").mkdir()],
        "model.safetensors is no file",
    ),
    "adapters": (
        lambda f: [(f / "config.json").unlink(), (f / "adapter_config.json").write_text("{}")],
        "holds adapters (LoRA), not a model: merge them into theirs first",
    ),
    "an index that names too much": (
        lambda f: sharded(f, partial(indexed, name="model.surprise")),
        "disagree about model.surprise",
    ),
    "a file outside of the folder": (
        lambda f: sharded(
            f, partial(indexed, name="model.norm.weight", file="../source/model-00001-of-00004.safetensors")
        ),
        "disagree about model.norm.weight",
    ),
    "weights of two dtypes": (
        lambda f: weights(f, model__layers__0__self_attn__q_proj__weight=torch.zeros(144, 80).bfloat16()),
        "are one tensor in Megatron but are stored as bfloat16 and float32: choose with --dtype",
    ),
}


@pytest.mark.parametrize("what", HUGGING_FACE)
def test_of_a_hugging_face_folder(what: str, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, words = HUGGING_FACE[what]
    source = shutil.copytree(hf, tmp_path / "source")
    spoil(source)
    refused(["hf-to-megatron", source, tmp_path / "target"], words, tmp_path, capsys)


class Payload:
    """What a hostile pickle does when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def hostile(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(folder.parent / "run")))


def hostile_chunk(folder: Path) -> None:
    """A chunk whose own pickle is hostile, of the length that is expected or less."""
    chunk = next(iter(DistReader(folder).tensors.values())).chunks[0]
    path = folder / chunk.file
    content = path.read_bytes()
    with (folder / "hostile").open("wb") as file:
        torch.save(Payload(folder.parent / "run"), file)
    evil = (folder / "hostile").read_bytes()
    # The archive's directory is looked for at the end.
    where = chunk.start + chunk.length - len(evil)
    path.write_bytes(content[:where] + evil + content[where + len(evil) :])


def real_metadata(folder: Path) -> Any:
    """torch's own object, to be changed and written again."""
    from torch.distributed.checkpoint import FileSystemReader

    return FileSystemReader(folder).read_metadata()


def unfit(folder: Path, **changes: Any) -> None:
    """Under one more key, or without one."""
    metadata = real_metadata(folder)
    for name, other in changes.items():
        entry = metadata.state_dict_metadata.pop("decoder.final_layernorm.weight")
        index = next(i for i in metadata.storage_data if i.fqn == "decoder.final_layernorm.weight")
        info = metadata.storage_data.pop(index)
        if name == "renamed":
            metadata.state_dict_metadata[other] = entry
            metadata.storage_data[type(index)(other, index.offset)] = info
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def with_nan(folder: Path) -> None:
    stored = DistReader(folder).tensors
    with ChunkFile(folder / "__9_0.distcp") as file:
        file.write("decoder.final_layernorm.weight", torch.full((80,), float("inf")), (0,), (80,))
    metadata = real_metadata(folder)
    index = next(i for i in metadata.storage_data if i.fqn == "decoder.final_layernorm.weight")
    place = metadata.storage_data[index]
    place.relative_path, place.offset, place.length = "__9_0.distcp", 0, file.records[0]["length"]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert stored.keys() == DistReader(folder).tensors.keys()


def outside(folder: Path) -> None:
    metadata = real_metadata(folder)
    for info in metadata.storage_data.values():
        info.relative_path = "../" + info.relative_path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def long_numbers(folder: Path) -> None:
    metadata = real_metadata(folder)
    for info in metadata.storage_data.values():
        info.offset = 10**5000
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def legacy(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "latest_checkpointed_iteration.txt").write_text("12\n")
    (folder / "iter_0000012" / "mp_rank_00").mkdir(parents=True)
    (folder / "iter_0000012" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"pickle")


MEGATRON: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a hostile pickle": (
        hostile,
        ".metadata is a pickle that names posix.mkdir, which no checkpoint needs and which could run code: refused",
    ),
    "a hostile chunk": (hostile_chunk, "__0_0.distcp is damaged at byte 0"),
    "damaged metadata": (lambda f: cut(f / ".metadata", 50), ".metadata is damaged"),
    "another pickle": (lambda f: (f / ".metadata").write_bytes(pickle.dumps({"a": 1})), ".metadata holds a dict"),
    "a truncated file": (lambda f: cut(f / FIRST, 100), "__0_0.distcp is cut short"),
    "a missing file": (lambda f: (f / FIRST).unlink(), "__0_0.distcp is missing, though .metadata names it"),
    "a file outside of the folder": (outside, ".metadata does not describe a checkpoint"),
    "an altered file": (
        lambda f: (f / FIRST).write_bytes(bytes((f / FIRST).stat().st_size)),
        "__0_0.distcp is damaged at byte 0: there is no saved tensor there",
    ),
    "an unknown tensor": (lambda f: unfit(f, renamed="decoder.surprise"), "decoder.surprise, which no rule of qwen3"),
    "a missing tensor": (lambda f: unfit(f, removed=None), "lacks decoder.final_layernorm.weight"),
    "a checkpoint of another model": (
        lambda f: config(f, intermediate_size=96),
        "decoder.layers.mlp.linear_fc1.weight has shape (4, 224, 80), not (4, 192, 80)",
    ),
    "infinity": (with_nan, "model.norm.weight holds 80 elements that are NaN or infinite"),
    "an unfinished checkpoint": (lambda f: (f / "metadata.json").unlink(), "is no finished checkpoint of Megatron"),
    "another format": (
        lambda f: (f / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "is a checkpoint of the kind 'zarr'; torch_dist can be read",
    ),
    "the legacy format": (legacy, "model_optim_rng.pt is a pickle, which can run code"),
    "an iteration that is not there": (
        lambda f: [p.unlink() for p in f.iterdir()] + [(f / "latest_checkpointed_iteration.txt").write_text("3")],
        "names '3', but there is no",
    ),
    "an iteration of five thousand digits": (
        lambda f: (
            [p.unlink() for p in f.iterdir()] + [(f / "latest_checkpointed_iteration.txt").write_text("3" * 5000)]
        ),
        "must hold a number or the word release, not '3333",
    ),
    "an iteration that only looks like a number": (
        lambda f: [p.unlink() for p in f.iterdir()] + [(f / "latest_checkpointed_iteration.txt").write_text("²")],
        "must hold a number or the word release, not '²'",
    ),
    "metadata with numbers of five thousand digits": (long_numbers, ".metadata does not describe a checkpoint"),
    "metadata.json of a hundred thousand brackets": (
        lambda f: (f / "metadata.json").write_text("[" * 100_000),
        "metadata.json cannot be read",
    ),
    "files that the disk does not give": (
        lambda f: [(f / FIRST).unlink(), (f / FIRST).symlink_to("/proc/self/mem")],
        FIRST,
    ),
    "a tokenizer that the disk does not give": (
        lambda f: [(f / "tokenizer.json").unlink(), (f / "tokenizer.json").symlink_to("/proc/self/mem")],
        "tokenizer.json cannot be read: Input/output error",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "name the Hugging Face folder of the model"),
    "nothing": (lambda f: shutil.rmtree(f), "There is no checkpoint folder"),
}


@pytest.mark.parametrize("what", MEGATRON)
def test_of_a_checkpoint(what: str, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, words = MEGATRON[what]
    source = shutil.copytree(megatron, tmp_path / "source")
    spoil(source)
    refused(["megatron-to-hf", source, tmp_path / "target"], words, tmp_path, capsys)


def refused(arguments: list[Any], words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one line, no target, nothing left over, nothing run."""
    before = sorted(folder.iterdir())
    assert cli.main(["convert", *map(str, arguments), "--quiet"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
    assert said.err.startswith("megarl: ") and said.err.count("\n") == 1
    assert sorted(folder.iterdir()) == before


def test_a_target_that_exists_is_left_alone(
    hf: Path, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("x")
    for direction, source in (("hf-to-megatron", hf), ("megatron-to-hf", megatron)):
        refused([direction, source, tmp_path / "target"], "exists already and is not overwritten", tmp_path, capsys)
    assert (tmp_path / "target" / "mine").read_text() == "x"


def test_a_target_may_be_a_link_to_the_place(
    hf: Path, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is followed, and what it names is made, or refused as it would be itself."""
    for direction, source in (("hf-to-megatron", hf), ("megatron-to-hf", megatron)):
        away, link = tmp_path / direction, tmp_path / f"{direction}-link"
        (away / "empty").mkdir(parents=True)
        for place in ("new", "empty"):
            link.symlink_to(away / place)
            assert cli.main(["convert", direction, str(source), str(link), "--quiet"]) == 0
            assert link.is_symlink() and (away / place / "config.json").is_file()
            assert sorted(path.name for path in away.iterdir()) == sorted({place, "new", "empty"})
            capsys.readouterr()
            refused(
                [direction, source, link], f"{away / place} exists already and is not overwritten", tmp_path, capsys
            )
            link.unlink()
        link.symlink_to(link)
        refused([direction, source, link], "cannot be made: it is a symbolic link to itself", tmp_path, capsys)
        link.unlink()


def test_paths_that_name_nothing_are_one_sentence(
    hf: Path, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = tmp_path / ("x" * 300)
    for direction, source in (("hf-to-megatron", hf), ("megatron-to-hf", megatron)):
        refused([direction, source, "/"], "/ exists already and is not overwritten", tmp_path, capsys)
        refused([direction, source, long], "cannot be made: File name too long", tmp_path, capsys)
        refused([direction, long, tmp_path / "t"], "cannot be read: File name too long", tmp_path, capsys)
        (tmp_path / "file").touch()
        refused([direction, source, tmp_path / "file" / "t"], "cannot be made: Not a directory", tmp_path, capsys)
    for command in (["verify", hf, long], ["verify", long, hf], ["inspect", long]):
        assert cli.main(["convert", *map(str, command)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"megarl: {long}") and said.endswith(" cannot be read: File name too long.\n")


def test_the_folder_of_a_run_points_to_the_models_in_it(
    hf: Path, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = tmp_path / "run" / "checkpoints" / "step-000040"
    shutil.copytree(megatron, step / "actor")
    for folder in (tmp_path / "run", step.parent, step):
        words = f"{folder} is no model but holds some: name one of them ({step / 'actor'})"
        for direction in ("hf-to-megatron", "megatron-to-hf"):
            refused([direction, folder, tmp_path / "t"], words, tmp_path, capsys)
        for command in (["verify", hf, folder], ["inspect", folder]):
            assert cli.main(["convert", *map(str, command)]) == 2
            assert words in capsys.readouterr().err


def test_the_two_kinds_are_not_taken_for_each_other(
    hf: Path, megatron: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(["hf-to-megatron", megatron, tmp_path / "t"], "is a checkpoint of Megatron", tmp_path, capsys)
    refused(["megatron-to-hf", hf, tmp_path / "t"], "no finished checkpoint of Megatron", tmp_path, capsys)
    other = make_tiny("llama", tmp_path / "llama")
    refused(
        ["megatron-to-hf", megatron, tmp_path / "t", "--config", other],
        "has a config.json of its own, and --config",
        tmp_path,
        capsys,
    )
    same_shapes = make_tiny("qwen3", tmp_path / "other", rope_theta=77.0)
    refused(["megatron-to-hf", megatron, tmp_path / "t", "--config", same_shapes], "otherwise of", tmp_path, capsys)
    for size in ("0", "inf", "nan"):
        refused(["hf-to-megatron", hf, tmp_path / "t", "--shard-gb", size], "must be above 0", tmp_path, capsys)


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Of files of so many bytes at most."""
    kept = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, kept)


def test_a_disk_that_takes_nothing_is_one_sentence_and_nothing_stays(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new" / "newer" / "target"
    with disk_of(500):
        assert cli.main(["convert", "hf-to-megatron", str(hf), str(target), "--quiet"]) == 1
    assert capsys.readouterr().err == f"megarl: {target} cannot be made: File too large.\n"
    assert list(tmp_path.iterdir()) == []


def test_the_other_processes_say_what_the_disk_did_not_take(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[BaseException | None] = []

    def agree(self: Processes, error: BaseException | None = None) -> None:
        told.append(error)
        if error is not None:
            raise error

    monkeypatch.setattr(Processes, "agree", agree)
    with disk_of(50_000), pytest.raises(RunError):
        hf_to_megatron(hf, tmp_path / "target", show=False)
    assert str(told[-1]).startswith(f"{tmp_path / 'target'} could not be written: File too large.")


@pytest.mark.parametrize("name", ["target", "x" * 300])
def test_folders_that_were_made_for_a_target_do_not_stay(
    name: str, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(hf, tmp_path / "hf")
    weights(source, model__norm__weight=torch.full((80,), float("nan")))
    assert cli.main(["convert", "hf-to-megatron", str(source), str(tmp_path / "new" / "newer" / name), "--quiet"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_disk_that_takes_no_more_is_one_sentence_and_what_is_done_is_kept(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["convert", "hf-to-megatron", str(hf), str(tmp_path / "target"), "--quiet", "--shard-gb"]
    with disk_of(250_000):
        assert cli.main([*arguments, "0.0005"]) == 1
    said = capsys.readouterr().err
    assert said == (
        f"megarl: {tmp_path / 'target'} could not be written: File too large. "
        f"What is finished is kept in {tmp_path / '.target.unfinished'}: start again to go on.\n"
    )
    assert not (tmp_path / "target").exists()
    assert cli.main([*arguments, "0.0005"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def everything(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


THEIRS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a folder of theirs": (lambda root: (root / "files").mkdir(parents=True), "which holds files"),
    "more than ours": (lambda root: [root.mkdir(), (root / "lock").touch(), (root / "a").touch()], "which holds a"),
    "a link in it": (
        lambda root: [root.mkdir(), (root / "lock").touch(), (root / "done").symlink_to("../theirs")],
        "which holds done",
    ),
    "a link": (lambda root: root.symlink_to("theirs"), "which is a link"),
    "a file": (lambda root: root.touch(), "which is no folder"),
}


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("what", THEIRS)
def test_nothing_is_made_in_a_folder_that_is_no_conversions(
    what: str, exists: bool, hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = THEIRS[what]
    target, root = tmp_path / "target", tmp_path / ".target.unfinished"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "precious").write_text("kept")
    make(root)
    if exists:
        target.mkdir()
        (target / "file").touch()
    before = everything(tmp_path)
    assert cli.main(["convert", "hf-to-megatron", str(hf), str(target)]) == 2
    words = f"{target} cannot be made: it would grow in {root}, {said} and is not a conversion's; move that away."
    assert capsys.readouterr().err.endswith(
        f"{target} exists already and is not overwritten.\n" if exists else f"{words}\n"
    )
    assert everything(tmp_path) == before


@pytest.mark.parametrize("direction", ["hf-to-megatron", "megatron-to-hf"])
def test_a_source_that_changes_meanwhile_is_told(
    direction: str,
    hf: Path,
    megatron: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was read before and after would not be one model."""
    source = shutil.copytree({"hf-to-megatron": hf, "megatron-to-hf": megatron}[direction], tmp_path / "source")
    weights = max([*source.glob("*.safetensors"), *source.glob("*.distcp")], key=lambda path: path.stat().st_size)
    finished = Unfinished.finished

    def trained_on(self: Unfinished, name: str, **record: Any) -> None:
        finished(self, name, **record)
        weights.write_bytes(weights.read_bytes())

    monkeypatch.setattr(Unfinished, "finished", trained_on)
    refused([direction, source, tmp_path / "target"], "source changed while it was converted", tmp_path, capsys)
