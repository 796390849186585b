"""A conversion that is killed and started again: what was finished is kept, and what comes out is right to the bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.bridge.hf_io import INDEX, HFWriter, companions, copy_texts
from megarl.bridge.model_map import ModelMap
from megarl.convert import unfinished
from megarl.convert.hf_to_megatron import hf_to_megatron
from megarl.convert.inspect import inspect
from megarl.convert.megatron_to_hf import megatron_to_hf
from megarl.convert.source import open_source
from megarl.convert.unfinished import Unfinished, said_of
from megarl.convert.verify import verify
from megarl.convert.work import Options
from megarl.errors import UserError
from megarl.models.tiny import random_weights, tiny_config
from tests.distributed import free_port

ROOT = Path(__file__).parents[2]
SHARD_GB = 0.0005
SIZES = {"hidden_size": 384, "intermediate_size": 1000, "num_hidden_layers": 12, "vocab_size": 5003}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 MB: half a second, in a hundred files."""
    folder = tmp_path_factory.mktemp("killed") / "hf"
    folder.mkdir()
    config = tiny_config("llama", **SIZES)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = ModelMap.from_hf(config).hf_shapes
    with HFWriter(folder, shapes, torch.bfloat16) as writer:
        for name, tensor in random_weights(shapes, 3):
            writer.write(name, tensor)
    return folder


def started(
    direction: str, source: Path, target: Path, variables: Mapping[str, str] | None = None, more: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "megarl.cli", "convert", direction, source, target),
            *("--quiet", "--shard-gb", str(SHARD_GB), *more),
        ],
        env=os.environ | {"PYTHONPATH": path, **(variables or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def said(process: subprocess.Popen[bytes]) -> bytes:
    """Its sentences, without what libraries log."""
    assert process.stderr is not None
    lines = process.stderr.read().splitlines(keepends=True)
    return b"".join(line for line in lines if line.startswith((b"megarl", b"Traceback")))


def kill_once(direction: str, source: Path, target: Path, files: int, wait: float = 0.0) -> set[str]:
    """Killed when it has finished so many files and a moment has passed. Answers with what was finished then."""
    process = started(direction, source, target)
    done = target.with_name(f".{target.name}.unfinished") / "done"
    try:
        while process.poll() is None and sum(1 for _ in done.glob("*.json")) < files:
            time.sleep(0.001)
        time.sleep(wait)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return {path.stem for path in done.glob("*.json")}


def test_what_is_finished_is_not_done_again(large: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    finished = kill_once("hf-to-megatron", large, target, 5)
    assert len(finished) >= 5 and not target.exists()
    files = tmp_path / ".target.unfinished" / "files"
    before = {name: (files / name).stat().st_mtime_ns for name in finished}
    options = Options(shard_bytes=int(SHARD_GB * 1e9))
    hf_to_megatron(large, target, options, show=False)
    assert {name: (target / name).stat().st_mtime_ns for name in finished} == before
    assert len(list(target.glob("*.distcp"))) > len(finished)
    assert verify(large, target, show=False).differences == []
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def rewritten(path: Path) -> None:
    """In a tensor that is converted first."""
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    start, _ = json.loads(content[8 : 8 + size])["model.embed_tokens.weight"]["data_offsets"]
    content[8 + size + start] ^= 1
    path.write_bytes(content)


def with_its_time(path: Path) -> None:
    """As `rsync -t` or a restored backup would."""
    was = path.stat()
    rewritten(path)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def replaced_with_its_time(path: Path) -> None:
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    rewritten(copy)
    os.utime(copy, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    copy.rename(path)


@pytest.mark.parametrize("where", ["in the folder", "behind a link", "outside, by the index"])
@pytest.mark.parametrize("change", [rewritten, with_its_time, replaced_with_its_time])
def test_what_was_begun_from_other_weights_is_begun_anew(
    change: Callable[[Path], None], where: str, hf: Path, tmp_path: Path
) -> None:
    target, options = tmp_path / "target", Options(shard_bytes=300_000)
    first = shutil.copytree(hf, tmp_path / "first")
    weights = first / "model.safetensors"
    if where != "in the folder":
        weights = weights.rename(tmp_path / "weights.safetensors")
    if where == "behind a link":
        (first / "model.safetensors").symlink_to(weights)
    elif where == "outside, by the index":
        weight_map = dict.fromkeys(ModelMap.from_hf(first).hf_shapes, "../weights.safetensors")
        (first / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    stopped(first, target, options)
    change(weights)
    hf_to_megatron(first, target, options, show=False)
    assert verify(first, target, show=False).differences == []


def test_what_is_begun_anew_is_told_with_why(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    changes = {
        "with another --dtype": Options(shard_bytes=300_000, dtype=torch.bfloat16),
        "with another --shard-gb and with another --allow-nonfinite": Options(allow_nonfinite=True),
    }
    for why, options in changes.items():
        stopped(hf, target, Options(shard_bytes=300_000))
        hf_to_megatron(hf, target, options)
        assert f"beginning anew: the 2 files that are there already were made {why}\n" in capsys.readouterr().err
        shutil.rmtree(target)
    stopped(hf, target, Options(shard_bytes=300_000))
    record = next((tmp_path / ".target.unfinished/done").iterdir())
    (tmp_path / ".target.unfinished/files" / record.stem).unlink()
    hf_to_megatron(hf, target, Options(shard_bytes=600_000))
    why = "the file that is there already was made with another --shard-gb"
    assert f"beginning anew: {why}\n" in capsys.readouterr().err
    back = tmp_path / "back"
    stopped(hf, back, Options(shard_bytes=300_000))
    megatron_to_hf(target, back)
    assert "there already were made in the other direction\n" in capsys.readouterr().err
    shutil.rmtree(target)
    stopped(hf, target, Options(shard_bytes=300_000))
    other = shutil.copytree(hf, tmp_path / "other")
    hf_to_megatron(other, target, Options(shard_bytes=300_000), show=False)
    assert capsys.readouterr().err == ""


def test_what_is_not_finished_is_told_where_a_model_is_looked_for(hf: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    stopped(hf, target, Options(shard_bytes=300_000))
    for folder in (target, tmp_path / ".target.unfinished"):
        for look in (inspect, open_source, lambda path: verify(hf, path, show=False)):
            with pytest.raises(
                UserError, match=r"target is not finished: .*/\.target\.unfinished holds 2 of its files"
            ):
                look(folder)
    for odd in ("..unfinished", ".unfinished", "x" * 300):
        assert said_of(tmp_path / odd) is None
    assert said_of(tmp_path / "file" / "x") is None
    hf_to_megatron(hf, target, Options(shard_bytes=300_000), show=False)
    assert open_source(target).kind == "megatron"


def stopped(source: Path, target: Path, options: Options) -> None:
    """As a kill after the second file leaves it."""
    process = os.fork()
    if process == 0:
        finished = Unfinished.finished

        def end_after(self: Unfinished, name: str, **record: Any) -> None:
            finished(self, name, **record)
            if name == "__1_0.distcp":
                first = self._done / "__0_0.distcp.json"
                while json.loads(first.read_text())["boot"] is not None:  # until it is on the disk
                    time.sleep(0.001)
                os._exit(0)

        Unfinished.finished = end_after  # type: ignore[method-assign]
        torch.set_num_threads(1)
        try:
            hf_to_megatron(source, target, options, show=False)
        finally:
            os._exit(1)
    assert os.waitpid(process, 0)[1] == 0
    assert len(list((target.with_name(f".{target.name}.unfinished") / "done").glob("*.json"))) == 2


@pytest.mark.parametrize("options", [Options(shard_bytes=300_000), Options(shard_bytes=300_000, durable=True)])
def test_what_a_power_cut_may_have_taken_is_written_anew(
    options: Options, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine starts again: what was finished and not seen to be on the disk is worth nothing."""
    target = tmp_path / "target"
    stopped(hf, target, options)
    files = tmp_path / ".target.unfinished" / "files"
    if not options.durable:  # the second is the last that was finished: nobody had waited for it
        lost = files / "__1_0.distcp"
        lost.write_bytes(bytes(lost.stat().st_size))
    monkeypatch.setattr(unfinished, "_boot", lambda: "another")
    kept = Unfinished(target).left(["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"], show=False)
    assert kept == (["__2_0.distcp"] if options.durable else ["__1_0.distcp", "__2_0.distcp"])
    hf_to_megatron(hf, target, options, show=False)
    assert verify(hf, target, show=False).differences == []


def test_of_what_lies_beside_the_weights_nothing_is_kept(hf: Path, tmp_path: Path) -> None:
    """Killed when it had copied all, and meanwhile the source has lost some of it."""
    source, target, options = shutil.copytree(hf, tmp_path / "hf"), tmp_path / "target", Options(shard_bytes=300_000)
    templates = source / "additional_chat_templates"
    templates.mkdir()
    for path in (source / "chat_template.jinja", templates / "old.jinja", templates / "new.jinja"):
        path.write_text(path.stem)
    stopped(source, target, options)
    copy_texts(source, tmp_path / ".target.unfinished/files")
    (source / "chat_template.jinja").unlink()
    (templates / "old.jinja").unlink()
    hf_to_megatron(source, target, options, show=False)
    assert companions(target) == companions(source)
    assert "additional_chat_templates/new.jinja" in companions(target)


def test_two_at_once_do_not_write_over_each_other(hf: Path, tmp_path: Path) -> None:
    from megarl.convert.processes import ALONE

    with (
        unfinished.unfinished(tmp_path / "target", {}, ALONE),
        pytest.raises(UserError, match="another process is making"),
    ):
        hf_to_megatron(hf, tmp_path / "target", show=False)


def test_a_process_that_is_left_of_a_killed_conversion_keeps_the_folder(hf: Path, tmp_path: Path) -> None:
    """The first process is gone, whose lock it was before; another one may still be writing."""
    target, options = tmp_path / "target", Options(shard_bytes=300_000)
    stopped(hf, target, options)
    growing = Unfinished(target)
    left = unfinished._joined(growing)
    before = {path: path.stat().st_mtime_ns for path in growing.root.rglob("*")}
    for other in (options, Options(dtype=torch.bfloat16)):
        with pytest.raises(UserError, match=r"another process is making .*target: wait for it, or end it"):
            hf_to_megatron(hf, target, other, show=False)
    assert {path: path.stat().st_mtime_ns for path in growing.root.rglob("*")} == before
    os.close(left)
    hf_to_megatron(hf, target, options, show=False)
    assert verify(hf, target, show=False).differences == []


@pytest.mark.slow
def test_the_rest_of_a_killed_torchrun_is_waited_for_and_says_one_sentence(large: Path, tmp_path: Path) -> None:
    """The first of two processes is killed, the second goes on (and is held a moment), and a conversion of another dtype is begun."""
    target, port = tmp_path / "target", str(free_port())
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    first, second = (started("hf-to-megatron", large, target, {**meeting, "RANK": str(rank)}) for rank in range(2))
    done = tmp_path / ".target.unfinished" / "done"
    while first.poll() is None and not (done / "__1_0.distcp.json").exists():
        time.sleep(0.001)
    second.send_signal(signal.SIGSTOP)
    first.kill()
    first.wait()
    another = started("hf-to-megatron", large, target, more=["--dtype", "float16"])
    assert another.wait() == 2 and b"another process is making" in said(another)
    second.send_signal(signal.SIGCONT)
    assert second.wait() == 1
    assert said(second) == b"megarl: process 1 of 2: another process of this conversion has ended.\n"
    kept = len(list(done.glob("*.json")))
    assert kept >= 1
    assert started("hf-to-megatron", large, target, more=["--dtype", "float16"]).wait() == 0
    reference = hf_to_megatron(large, tmp_path / "reference", Options(dtype=torch.float16), show=False)
    assert verify(reference, target, show=False).differences == []


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["hf-to-megatron", "megatron-to-hf"])
def test_killed_ten_times_at_any_moment_it_ends_well(direction: str, large: Path, tmp_path: Path) -> None:
    source = large
    if direction == "megatron-to-hf":
        source = hf_to_megatron(large, tmp_path / "source", show=False)
    target, draw = tmp_path / "target", random.Random(5)
    kept = 0
    for _ in range(10):
        if target.exists():
            break
        kept = len(kill_once(direction, source, target, kept + draw.randint(1, 8), draw.random() * 0.01))
    # One that was killed between giving the target its name and clearing up is cleared up after.
    assert started(direction, source, target).wait() == (2 if target.exists() else 0)
    assert verify(large, target, show=False).differences == []
    assert not (tmp_path / ".target.unfinished").exists()
